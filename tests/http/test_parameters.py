"""Every parameter of the interface as an unmodified `openai` client sends it, and what comes back."""

from __future__ import annotations

from typing import Any

import llguidance
import openai
import pytest

from actors.core.logit_rules import LogitRules, LogprobsOrder
from cluster.request_sampling import choice_seed
from tests.http.harness import CHAT, CHAT_PATH, MODEL
from tests.http.test_endpoints import events_of

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEXT = "Hello, wörld!"
NUM_TOKENS = len(TEXT.encode()) + 1  # and the end token


@pytest.fixture
async def served(launch):
    """A server whose ranks say TEXT, and a client of it."""
    async with (
        launch(text=TEXT) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        yield server, client


async def test_several_choices_with_seeds_of_their_own(served):
    server, client = served
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=11)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, TEXT) for i in range(3)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS
    first = await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=11)
    assert first.usage is not None and first.usage.prompt_tokens == answer.usage.prompt_tokens
    sampled = {r.request_id: r.sampling for r in server.ranks[0].admitted}
    seeds = [params.seed for params in sampled.values()]
    assert seeds == [11, choice_seed(11, 1), choice_seed(11, 2), 11] and len(set(seeds)) == 3
    assert all(params.noise_key == params.seed for params in sampled.values())
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, temperature=1
    )
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [TEXT, TEXT]
    keys = {r.sampling.noise_key for r in server.ranks[0].admitted[-2:]}
    assert len(keys) == 2


async def test_choices_of_several_prompts_come_prompt_after_prompt(served):
    server, client = served
    answer = await client.completions.create(
        model=MODEL, prompt=["a", "bc"], n=2, max_tokens=3, echo=True
    )
    assert [c.text for c in answer.choices] == ["aHel", "aHel", "bcHel", "bcHel"]
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert [len(r.prompt_ids) for r in server.ranks[0].admitted] == [1, 1, 2, 2]


async def test_rules_reach_the_rank_and_plain_requests_have_none(served):
    server, client = served
    await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"7": -100, "3": 2, "9": 0},
        max_completion_tokens=9,
        user="somebody",
        extra_body={
            "repetition_penalty": 1.2,
            "min_tokens": 4,
            "ignore_eos": True,
            "priority": -2,
        },
    )
    await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, presence_penalty=0, logit_bias={}, logprobs=False
    )
    ruled, plain = server.ranks[0].admitted
    assert ruled.sampling.rules == LogitRules(1.2, -1.0, 0.5, ((3, 2.0), (7, -100.0)), 4)
    assert (ruled.priority, plain.priority) == (-2, 0)
    assert ruled.max_new_tokens == 9 and ruled.stop_token_ids == ()
    assert plain.sampling.rules is None and not plain.sampling.is_special


async def test_chat_logprobs_name_every_token_that_usage_counts(served):
    server, client = served
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "dspark": {"logprobs": "processed"}},
    )
    assert server.ranks[0].admitted[0].sampling.logprobs == LogprobsOrder(2, "processed")
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert answer.usage is not None and len(content) == answer.usage.completion_tokens == NUM_TOKENS
    raw = b"".join(bytes(entry.bytes or []) for entry in content)
    assert raw.decode() == TEXT + "<|im_end|>"
    assert [entry.logprob for entry in content] == [-i / 8 for i in range(NUM_TOKENS)]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[3].top_logprobs[0].token == "l" and content[8].token == "\ufffd"
    assert choice.to_dict()["token_ids"] == server.ranks[0].script


async def test_streamed_details_add_up_to_those_of_the_whole_answer(served):
    server, _ = served
    body = {**CHAT, "logprobs": True, "return_token_ids": True, "n": 2}
    whole = (await server.client.post(CHAT_PATH, json=body)).json()["choices"]
    content: list[list[Any]] = [[], []]
    ids: list[list[int]] = [[], []]
    for event in (await events_of(server.client, CHAT_PATH, body))[:-1]:
        (choice,) = event["choices"]
        content[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
        ids[choice["index"]] += choice.get("token_ids", [])
    for i in range(2):
        assert content[i] == whole[i]["logprobs"]["content"]
        assert ids[i] == whole[i]["token_ids"] and len(ids[i]) == NUM_TOKENS


async def test_completion_logprobs_say_where_each_token_starts(served):
    _, client = served
    answer = await client.completions.create(model=MODEL, prompt="hi", max_tokens=99, logprobs=1)
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens[8:10] == ["bytes:\\xc3", "bytes:\\xb6"]  # two halves of one character
    assert offsets is not None and offsets[:9] == list(range(9)) and offsets[9:11] == [8, 9]
    assert tokens[-1] == "<|im_end|>" and offsets[-1] == len(TEXT)
    assert choice.logprobs.token_logprobs == [-i / 8 for i in range(NUM_TOKENS)]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] == {"H": 0.0}


@pytest.mark.parametrize("tokens_a_step", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("stop", ["wör", "!", ["zz", "lo"], ", "])
async def test_text_ids_logprobs_and_usage_agree_wherever_a_stop_string_ends(
    launch, tokens_a_step, stop
):
    async with launch(text=TEXT) as server:
        server.ranks[0].tokens_a_step = tokens_a_step
        body = {**CHAT, "stop": stop, "logprobs": True, "return_token_ids": True}
        answer = (await server.client.post(CHAT_PATH, json=body)).json()
        events = await events_of(server.client, CHAT_PATH, body)
        await server.until(lambda: not server.ranks[0]._running)
    (choice,) = answer["choices"]
    found = min(
        TEXT.find(s) + len(s) for s in ([stop] if isinstance(stop, str) else stop) if s in TEXT
    )
    consumed = len(TEXT[:found].encode())
    assert choice["finish_reason"] == "stop"
    assert TEXT[:found].startswith(choice["message"]["content"])
    assert answer["usage"]["completion_tokens"] == consumed
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == consumed
    streamed = [e["choices"][0] for e in events[:-1]]
    assert sum(len(c.get("token_ids", [])) for c in streamed) == consumed
    text = "".join(c["delta"].get("content", "") for c in streamed)
    assert text == choice["message"]["content"]


async def test_a_stop_string_within_the_least_length_is_text(served):
    server, _ = served
    for least, shown in ((3, "Hel"), (5, "Hello, w"), (12, TEXT)):
        body = {**CHAT, "stop": ["lo", "ör"], "min_tokens": least}
        answer = (await server.client.post(CHAT_PATH, json=body)).json()
        assert answer["choices"][0]["message"]["content"] == shown


async def test_what_cannot_come_has_a_finite_logprob(served, monkeypatch):
    server, _ = served
    monkeypatch.setattr(
        server.ranks[0],
        "_logprobs",
        lambda request, index, end: tuple(
            type(entry)(entry.logprob, (1,), (float("-inf"),))
            for entry in type(server.ranks[0])._logprobs(server.ranks[0], request, index, end)
        ),
    )
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    answer = (await server.client.post(CHAT_PATH, json=body)).json()
    entry = answer["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"][0]["logprob"] == -9999.0


async def test_tokenize_and_detokenize_are_inverse(served):
    server, client = served
    text = "grüße 𝄞 <|im_end|>"
    answer = (await server.client.post("/tokenize", json={"prompt": text})).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 512
    back = (await server.client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": text}
    chat = (
        await server.client.post(
            "/tokenize", json={"messages": MESSAGES, "return_token_strs": True}
        )
    ).json()
    assert "".join(chat["token_strs"]).endswith("<|im_start|>assistant\n")
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert whole.usage is not None and whole.usage.prompt_tokens == chat["count"]


FORMATS = [
    ({"response_format": {"type": "json_object"}}, '{"a": [1, {"b": null}]}', "[1]"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "integer", "minimum": 3}},
            }
        },
        "12",
        "2",
    ),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true", "null"),
    ({"structured_outputs": {"regex": "a+b?"}}, "aab", "ba"),
    ({"structured_outputs": {"choice": ["yes", 'n"o\n']}}, 'n"o\n', "no"),
    ({"structured_outputs": {"grammar": 'start: "x" y\ny: /[0-9]/'}}, "x7", "xy"),
]


@pytest.mark.parametrize(("fields", "fits", "misfit"), FORMATS)
async def test_a_format_reaches_the_rank_as_a_grammar_of_what_it_allows(
    served, tmp_path, fields, fits, misfit
):
    server, _ = served
    answer = await server.client.post(CHAT_PATH, json={**CHAT, **fields, "n": 2})
    assert answer.status_code == 200, answer.text
    file = tmp_path / "tokenizer.json"
    server.codec.tokenizer.save(str(file))
    tokens = llguidance.LLTokenizer(str(file), server.codec.vocab_size, [257])
    for request in server.ranks[0].admitted:
        assert request.sampling.rules is not None and request.stop_token_ids == (257,)
        for text, is_word in ((fits, True), (misfit, False)):
            matcher = llguidance.LLMatcher(tokens, request.sampling.rules.grammar)
            ids = server.ids(text)
            assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == is_word


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            422,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "[a-"}}, 422, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, 422, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "x" * 300_000}}, 422, "structured_outputs.grammar"),
        ({"structured_outputs": {}}, 400, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, 400, "structured_outputs.choice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            400,
            "structured_outputs",
        ),
    ],
)
async def test_a_format_that_cannot_be_followed_is_refused(served, fields, status, param):
    server, _ = served
    answer = await server.client.post(CHAT_PATH, json={**CHAT, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not server.ranks[0].reserves
