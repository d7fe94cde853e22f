"""Right, wrong and absurd requests, and clients that leave: each is answered as promised, and nothing stays behind.

`python -m load_tests.fuzz --requests 10000` sends many more to a running server.
"""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from load_tests.fuzz import fuzz
from tests.http.engine_rank import MAX_LEN, EngineRank, replace_ranks, tiny_model
from tests.http.harness import CHAT, CHAT_PATH, launched

NUM_REQUESTS = 400
COMPLETION = {"prompt": "a", "max_tokens": 2}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
async def test_generated_requests_are_answered_as_documented_and_leave_nothing(
    tmp_path, caplog, seed
):
    engine, codec = tiny_model(tmp_path)
    async with launched(codec, max_model_len=MAX_LEN) as server:
        rank = EngineRank(server.hub.open("engine-0", "target"), engine)
        await replace_ranks(server, rank)
        loop = asyncio.get_running_loop()
        num_tasks = len(asyncio.all_tasks(loop))
        with caplog.at_level(logging.ERROR):
            finding = await fuzz(server.url, NUM_REQUESTS, seed)
        assert not finding.problems, "\n".join(finding.problems[:5])
        assert finding.statuses["200"] > NUM_REQUESTS / 5 and finding.statuses["left"]
        assert finding.statuses["400"] > NUM_REQUESTS / 10 and rank.num_accepted
        assert not [record for record in caplog.records if record.name != "asyncio"]
        await server.until(lambda: rank.is_clean and not server.dispatcher.num_streams, 20.0)
        await server.until(lambda: len(asyncio.all_tasks(loop)) <= num_tasks)
        answer = await server.client.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 200


# --- what the generated requests found, one by one --------------------------------------------------------------------


async def refusal(launch, path: str, body: object, **how: object) -> tuple[int, str, str]:
    async with launch() as server:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await server.client.post(path, content=content, **how)
        assert not server.ranks[0].reserves
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]


async def test_an_origin_that_is_no_address_is_a_foreign_one(launch):
    status, _, message = await refusal(launch, CHAT_PATH, CHAT, headers={"origin": "http://["})
    assert status == 403 and "ingress.cors_origins" in message


async def test_a_bias_for_a_token_of_thousands_of_digits_is_refused_by_name(launch):
    body = {**CHAT, "logit_bias": {"9" * 5000: 1}}
    status, param, message = await refusal(launch, CHAT_PATH, body)
    assert (status, param) == (400, "logit_bias") and "token ids" in message


async def test_unknown_fields_are_ignored_and_counted_messages_of_a_completion_too(launch):
    async with launch() as server:
        body = {**COMPLETION, "messages": ["hi", 3], "no_such_field": {"a": [None]}}
        answer = await server.client.post("/v1/completions", json=body)
        plain = await server.client.post("/v1/completions", json=COMPLETION)
        metrics = (await server.client.get("/metrics")).text
    assert answer.status_code == plain.status_code == 200
    assert answer.json()["choices"] == plain.json()["choices"]
    assert 'dspark:ignored_fields_total{ingress="ingress-0"} 2.0' in metrics


@pytest.mark.parametrize("depth", [101, 900, 100_000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "metadata", "tools"])
async def test_a_body_nested_too_deeply_is_refused(launch, depth, field):
    nested = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    body = b'{"messages": [{"role": "user", "content": "a"}], "%s": %s}' % (field.encode(), nested)
    status, _, message = await refusal(launch, CHAT_PATH, body)
    assert status == 400 and "nested more than 100 levels" in message


async def test_a_schema_sent_as_text_is_read_like_a_body(launch):
    for text in ("[" * 3000 + "]" * 3000, '{"maximum": NaN}', "{"):
        body = {**CHAT, "structured_outputs": {"json": text}}
        status, param, _ = await refusal(launch, CHAT_PATH, body)
        assert (status, param) == (400, "structured_outputs.json")


@pytest.mark.parametrize("value", ["\ud800", 10**400])
async def test_a_schema_that_the_grammar_library_cannot_read_is_422_naming_the_field(launch, value):
    schema = {"enum": [value]}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    tools = [{"type": "function", "function": function}]
    for fields, field in (
        ({"response_format": format_}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"tools": tools, "tool_choice": "required"}, "tools"),
    ):
        status, param, _ = await refusal(launch, CHAT_PATH, {**CHAT, **fields})
        assert (status, param) in ((422, field), (400, "messages"))


NO_WORDS = (
    {"regex": r"ab[^\s\S]"},
    {"grammar": "start: start"},
    {"grammar": "start: <|of_another_model|>"},
    {"grammar": "start: <[5000000]>"},
    {"json": {"$ref": "#"}},
)


@pytest.mark.parametrize("outputs", NO_WORDS)
async def test_a_grammar_without_words_is_refused_before_a_rank_finds_out(launch, outputs):
    status, param, message = await refusal(
        launch, CHAT_PATH, {**CHAT, "structured_outputs": outputs}
    )
    assert (status, param) == (422, f"structured_outputs.{next(iter(outputs))}")
    assert "cannot be followed" in message and "<state>" not in message
