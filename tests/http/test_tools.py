"""Tools over HTTP: what the model is told, what it must write, and what a client reads."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import openai
import pytest

from tests.http.harness import CHAT, CHAT_PATH, MODEL

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def seen(server, index: int = 0) -> str:
    return server.codec.decode(server.ranks[0].admitted[index].prompt_ids.tolist())


async def test_calls_come_as_openai_shows_them(launch):
    async with (
        launch(text=f"Let me see.\n{ADD}\n{NOW}", max_model_len=4096) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n" and choice.message.tool_calls
        calls = [
            (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls
        ]
        assert calls == [("add", {"a": 3}), ("now", {})]
        assert len({c.id for c in choice.message.tool_calls}) == 2
        assert '"name": "add"' in seen(server) and "<tools>" in seen(server)
        assert server.ranks[0].admitted[0].sampling.rules is None
        # The model's words stay words when no tool was offered.
        plain = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="none"
        )
        assert ADD in (plain.choices[0].message.content or "")
        assert plain.choices[0].finish_reason == "stop" and "<tools>" not in seen(server, 1)


@pytest.mark.parametrize("tokens_a_step", [1, 2, 7, 500])
async def test_a_stream_brings_the_same_calls_for_every_chunking(launch, tokens_a_step):
    async with (
        launch(text=f"Well.{ADD}{NOW}", max_model_len=4096) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        server.ranks[0].tokens_a_step = tokens_a_step
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True
        )
        text, calls, reasons = "", {}, []
        async for chunk in stream:
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                assert call.index not in calls and call.function is not None
                calls[call.index] = (call.function.name, call.function.arguments)
    assert text == "Well." and reasons[-1] == "tool_calls" and set(reasons[:-1]) <= {None}
    assert calls == {0: ("add", '{"a": 3}'), 1: ("now", "{}")}


@pytest.mark.parametrize(
    ("fields", "fits", "misfits"),
    [
        ({"tool_choice": "required"}, f"{ADD}\n{NOW}", "Well."),
        ({"tool_choice": "required", "parallel_tool_calls": False}, NOW, f"{ADD}\n{NOW}"),
        # A model that may write any space writes spaces until its length is used up.
        ({"tool_choice": "required"}, NOW, NOW.replace('": ', '":  ')),
        ({"tool_choice": "required"}, NOW, NOW.replace('{"name', '{  "name')),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ADD, NOW),
    ],
)
async def test_a_demanded_call_is_all_that_the_model_can_write(
    launch, tmp_path, fields, fits, misfits
):
    async with launch(text=fits, max_model_len=4096) as server:
        answer = await server.client.post(CHAT_PATH, json={**CHAT, "tools": TOOLS, **fields})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        is_named = isinstance(fields["tool_choice"], dict)
        assert choice["finish_reason"] == ("stop" if is_named else "tool_calls")
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == fits.count("<tool_call>")
        file = tmp_path / "tokenizer.json"
        server.codec.tokenizer.save(str(file))
        tokens = llguidance.LLTokenizer(str(file), server.codec.vocab_size, [257])
        rules = server.ranks[0].admitted[0].sampling.rules
        for text, is_word in ((fits, True), (misfits, False)):
            matcher = llguidance.LLMatcher(tokens, rules.grammar)
            assert (matcher.consume_tokens(server.ids(text)) and matcher.is_accepting()) == is_word


async def test_earlier_calls_and_their_results_are_told_to_the_model(launch):
    history = [
        {"role": "user", "content": "3?"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 3}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    async with launch(text="4.", max_model_len=4096) as server:
        answer = await server.client.post(
            CHAT_PATH, json={"model": MODEL, "messages": history, "tools": TOOLS}
        )
        assert answer.json()["choices"][0]["message"]["content"] == "4."
        prompt = seen(server)
    assert ADD in prompt and "<tool_response>\n4\n</tool_response>" in prompt
    assert prompt.index("<tools>") < prompt.index("3?") < prompt.index(ADD)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, 400, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            400,
            "tool_choice.function.name",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, 400, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            400,
            "tools[0].function.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            400,
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, 400, "min_tokens"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "wrong"}}}
                ],
                "tool_choice": "required",
            },
            422,
            "tools",
        ),
    ],
)
async def test_bad_tools_are_named(launch, fields, status, param):
    async with launch() as server:
        answer = await server.client.post(CHAT_PATH, json={**CHAT, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not server.ranks[0].reserves
