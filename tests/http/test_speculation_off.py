"""Every parameter over HTTP through a real engine: with speculation on and off, the same answer byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.engine_rank import EngineRank, replace_ranks, tiny_model
from tests.http.harness import Server, launched

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"top_p": 0.8, "top_k": 20},
    "choices": {"n": 3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "repetition": {"repetition_penalty": 1.5},
    "bias": {"logit_bias": {"40": 3.5, "7": -100}},
    "least length": {"min_tokens": 20, "logit_bias": {"2": 6}},
    "end ignored": {"ignore_eos": True, "logit_bias": {"2": 6}},
    "stop strings": {"stop": ["a", "%", "Q", "x"]},
    "stop ids": {"stop_token_ids": list(range(20, 24))},
    "raw logprobs": {"logprobs": 3},
    "processed logprobs": {"logprobs": 2, "dspark": {"logprobs": "processed"}, "top_p": 0.9},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "regex": {"structured_outputs": {"regex": "[a-f]{3,9}![0-9]+ok"}},
    "everything": {
        "n": 2,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {"40": 2},
        "logprobs": 1,
        "stop": ["Z"],
        "structured_outputs": {"regex": "[ -Z]{10,30}"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
async def engine(model):
    """A server with one real engine behind it."""
    tiny_engine, codec = model
    async with launched(codec) as server:
        rank = EngineRank(server.hub.open("engine-0", "target"), tiny_engine)
        await replace_ranks(server, rank)
        yield server, rank


async def complete(server: Server, speculation: bool, **fields: Any) -> dict[str, Any]:
    body = {
        "prompt": ["The fox", "Some other one: "],
        "max_tokens": 40,
        "return_token_ids": True,
        **fields,
        "dspark": {**fields.get("dspark", {}), "speculation": speculation},
    }
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
async def test_answers_are_byte_identical_with_speculation_on_and_off(engine, how):
    server, rank = engine
    for name, fields in PARAMETERS.items():
        off = await complete(server, False, **how, **fields)
        on = await complete(server, True, **how, **fields)
        assert json.dumps(on["choices"]) == json.dumps(off["choices"]), name
        assert on["usage"]["completion_tokens"] == off["usage"]["completion_tokens"]
        assert off["usage"]["dspark"]["num_scheduled"] == 0
        num_ids = sum(len(choice["token_ids"]) for choice in on["choices"])
        assert num_ids == on["usage"]["completion_tokens"]
    assert rank.num_accepted > 300
    await server.until(lambda: rank.problems == [])


async def test_json_is_valid_at_temperature_one_with_speculation(engine):
    server, rank = engine
    format_ = PARAMETERS["schema"]
    for turn in range(6):
        answer = await complete(server, True, temperature=1, n=8, max_tokens=60, **format_)
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop", turn
            value = json.loads(choice["text"])
            assert value["a"] <= 99 and value["b"] in ("x", "yz")
    assert rank.num_accepted > 100


async def test_a_format_cut_by_the_length_says_so(engine):
    server, _ = engine
    answer = await complete(server, True, **{**PARAMETERS["schema"], "max_tokens": 3})
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
