"""The unmodified `openai` client against a real (tiny) engine with speculation: every parameter does what it says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from cluster.text import TextCodec
from tests.http.engine_rank import EOS, MAX_LEN, TEMPLATE, EngineRank, replace_ranks, tiny_model
from tests.http.harness import MODEL, launched

MESSAGES: Any = [{"role": "user", "content": "The fox"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yz"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    engine, codec = tiny_model(tmp_path_factory.mktemp("tiny-llama"))
    # A template that knows tools says little about them: the context is short.
    template = "{% if tools %}{{ tools | length }} tools. {% endif %}" + TEMPLATE
    return engine, TextCodec(codec.tokenizer, eos_token_ids=(EOS,), chat_template=template)


@dataclass
class Asker:
    """The client, with what most requests here have in common."""

    client: openai.AsyncOpenAI
    rank: EngineRank

    async def chat(self, **fields: Any) -> Any:
        fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "messages": MESSAGES, **fields}
        return await self.client.chat.completions.create(model=MODEL, **fields)

    async def complete(self, **fields: Any) -> Any:
        fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "prompt": "The fox", **fields}
        return await self.client.completions.create(model=MODEL, **fields)

    async def text(self, **fields: Any) -> str:
        """Of a chat; a completion must obey the same fields."""
        said = (await self.chat(**fields)).choices[0].message.content
        assert (await self.complete(**fields)).choices[0].text is not None
        return str(said)

    async def completed(self, **fields: Any) -> str:
        return str((await self.complete(**fields)).choices[0].text)


@pytest.fixture
async def ask(model) -> AsyncIterator[Asker]:
    engine, codec = model
    async with (
        launched(codec, max_model_len=MAX_LEN) as server,
        openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client,
    ):
        intake = server.front.intake
        intake.limits = replace(intake.limits, tool_parser="json")
        rank = EngineRank(server.hub.open("engine-0", "target"), engine)
        await replace_ranks(server, rank)
        yield Asker(client, rank)
        await server.until(lambda: rank.is_clean)


async def test_what_draws_tokens(ask: Asker) -> None:
    greedy = await ask.completed()
    assert await ask.completed() == greedy and len(greedy) == NUM_TOKENS
    hot = {"temperature": 1.0}
    assert await ask.completed(**hot, top_p=0.001) == greedy
    assert await ask.completed(**hot, extra_body={"top_k": 1}) == greedy
    seeded = await ask.completed(**hot, seed=7)
    assert await ask.completed(**hot, seed=7) == seeded
    assert len({greedy, seeded, await ask.completed(**hot, seed=8)}) == 3
    assert await ask.text(seed=7) == await ask.text(seed=9)  # at temperature 0, whatever the seed


async def test_penalties_and_biases(ask: Asker) -> None:
    greedy = await ask.completed()
    repeated = len(greedy) - len(set(greedy))
    assert repeated > 3
    for name in ("presence_penalty", "frequency_penalty"):
        said = await ask.completed(**{name: 2.0})
        assert said != greedy and len(said) - len(set(said)) < repeated
    assert await ask.completed(extra_body={"repetition_penalty": 5.0}) != greedy
    letter = await ask.completed(logit_bias={"40": 100})
    assert len(set(letter)) == 1
    assert letter[0] not in await ask.completed(logit_bias={"40": -100})


async def test_lengths_and_ends(ask: Asker) -> None:
    to_end = {"logit_bias": {str(EOS): 100}}
    assert await ask.completed(**to_end) == ""
    assert len(await ask.completed(**to_end, extra_body={"min_tokens": 5})) == 5
    assert await ask.completed(**to_end, extra_body={"ignore_eos": True}) == ""  # shown as nothing
    endless = await ask.complete(**to_end, extra_body={"ignore_eos": True})
    assert endless.choices[0].finish_reason == "length"
    assert endless.usage.completion_tokens == NUM_TOKENS
    short = await ask.chat(max_tokens=None, max_completion_tokens=4)
    assert short.usage.completion_tokens == 4 and short.choices[0].finish_reason == "length"
    greedy = await ask.completed()
    stop = greedy[11:13]
    cut = await ask.complete(stop=[stop, "never"])
    assert cut.choices[0].text == greedy[: greedy.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    ids = (await ask.complete(extra_body={"return_token_ids": True})).choices[0].token_ids
    stopped = await ask.complete(extra_body={"stop_token_ids": [ids[9]]})
    assert stopped.usage.completion_tokens == ids.index(ids[9]) + 1


async def test_several_choices_and_prompts(ask: Asker) -> None:
    both = await ask.complete(prompt=["The fox", "A cat"], n=2, best_of=2, echo=True, max_tokens=5)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    begins = ["The fox", "The fox", "A cat", "A cat"]
    assert all(c.text.startswith(p) for c, p in zip(both.choices, begins, strict=True))
    assert [len(c.text) for c in both.choices] == [12, 12, 10, 10]
    ids = await ask.complete(prompt=[[30, 31], [32]], max_tokens=3)
    assert len(ids.choices) == 2 and ids.usage.prompt_tokens == 3
    chats = await ask.chat(n=3, seed=3, temperature=1.0)
    assert len({c.message.content for c in chats.choices}) == 3


async def test_log_probabilities(ask: Asker) -> None:
    chat = await ask.chat(logprobs=True, top_logprobs=2)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens == NUM_TOKENS
    assert all(e.logprob == e.top_logprobs[0].logprob <= 0 for e in entries)  # greedy
    only = {"top_k": 1, "dspark": {"logprobs": "processed"}}
    done = await ask.complete(logprobs=1, temperature=1.0, extra_body=only)
    assert set(done.choices[0].logprobs.token_logprobs) == {0.0}  # nothing else could come


async def test_formats_and_tools(ask: Asker) -> None:
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 70}
    value = json.loads((await ask.chat(**hot, response_format=FORMAT)).choices[0].message.content)
    assert value["a"] <= 99 and value["b"] in ("x", "yz")
    any_object = await ask.chat(**hot, response_format={"type": "json_object"})
    assert any_object.choices[0].message.content.startswith("{")
    outputs = {"structured_outputs": {"regex": "[a-f]{3}![0-9]"}}
    assert "!" in await ask.completed(**hot, extra_body=outputs)
    hot["max_tokens"] = 95
    forced = await ask.chat(**hot, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = forced.choices[0].message.tool_calls
    assert forced.choices[0].finish_reason == "tool_calls" and call.function.name in "fg"
    assert json.loads(call.function.arguments)["a"] <= 99
    named: Any = {"type": "function", "function": {"name": "g"}}
    chosen = await ask.chat(**hot, tools=TOOLS, tool_choice=named)
    assert chosen.choices[0].message.tool_calls[0].function.name == "g"
    assert (await ask.chat(**hot, tools=TOOLS, tool_choice="none")).choices[0].message.content


async def test_streams_and_usage(ask: Asker) -> None:
    whole = await ask.chat(messages=[{"role": "user", "content": "Once more, as before"}])
    again = await ask.chat(
        messages=[{"role": "user", "content": "Once more, as before"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in again]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens >= 0
    off = await ask.chat(extra_body={"dspark": {"speculation": False}})
    assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert off.choices[0].message.content == (await ask.chat()).choices[0].message.content


async def test_fields_that_change_no_answer_and_fields_that_are_refused(ask: Asker) -> None:
    plain = await ask.text()
    about: Any = {"user": "somebody", "extra_body": {"priority": -3, "nobody_knows": [1]}}
    assert await ask.text(**about) == plain
    assert (await ask.chat(store=True, metadata={"a": "b"})).choices[0].message.content == plain
    with pytest.raises(openai.BadRequestError) as caught:
        await ask.complete(suffix="the end")
    assert caught.value.param == "suffix"
    assert (await ask.client.models.retrieve(MODEL)).id == MODEL
