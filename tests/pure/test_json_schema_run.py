"""`load_tests.json_schema`: what it asks, and which answers it takes for valid."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from load_tests.json_schema import (
    MOST_RETRIES,
    SCHEMAS,
    Finding,
    answered,
    asks,
    problem_with,
    report,
)
from load_tests.sse import BrokenStreamError, StreamRecord

VALID: dict[str, Any] = {
    "fields": {"name": "a", "age": 7, "is_member": True, "score": -0.5},
    "choices": {"size": None, "kind": "order", "amount": 3},
    "rows": [{"title": "a", "year": 1999}, {"title": "b", "year": 2000}],
    "patterns": {"code": "AB-1234", "date": "2024-02-29", "tags": ["abc"]},
    "either": {"type": "label", "text": "x"},
    "tree": {"root": {"left": {"value": 1}, "right": None}, "note": "n"},
    "optional": {"city": "Bonn", "zip": "1"},
}
ASK = asks(1, seed=1)[0]


def answer(
    text: str, *, finish: str = "stop", accepted: int = 2, rejected: int = 1
) -> StreamRecord:
    return StreamRecord(
        ASK.schema, 0.0, pieces=[text], finish_reason=finish, done=True, completion_tokens=9,
        accepted_tokens=accepted, rejected_tokens=rejected,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_takes_what_it_should(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert problem_with(name, json.dumps(VALID[name])) == ""


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ("optional", "{}", "'city' is a required property"),
        ("optional", '{"city": "a", "x": 1}', "Additional properties"),
        ("patterns", '{"code": "AB-1234", "date": "2023-02-29", "tags": []}', "'date'"),
        ("fields", '{"name": "a", "age": 7, "is_member": true, "score": NaN}', "not JSON"),
        ("fields", '{"name": "a", "age": 7, "is_member": true, "score": 0.3}', "multiple of"),
        ("rows", '[{"title": "a"', "not JSON"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_found(
    schema: str, text: str, problem: str
) -> None:
    assert problem in problem_with(schema, text)


def test_the_same_seed_asks_the_same_with_every_schema_seeded_and_not() -> None:
    asked = asks(28, seed=3)
    assert asked == asks(28, seed=3) != asks(28, seed=4)
    assert len({ask.prompt for ask in asked}) == 28
    both = {(name, is_seeded) for name in SCHEMAS for is_seeded in (False, True)}
    assert {(ask.schema, ask.seed is not None) for ask in asked} == both
    assert "seed" not in asked[0].body("m") and asked[1].body("m")["seed"] == asked[1].seed


def test_one_invalid_or_unfinished_answer_or_a_run_without_speculation_fails() -> None:
    finding = Finding()
    finding.take(ASK, answer(json.dumps(VALID["fields"])))
    told = report(finding, [], 1.0)
    assert told["ok"] and (told["valid"], told["invalid"]) == (1, 0)
    assert not report(finding, ["target-0: 1 running"], 1.0)["ok"]
    finding.take(ASK, answer("{}"))
    told = report(finding, [], 1.0)
    assert not told["ok"] and told["by_schema"]["fields"] == {"valid": 1, "invalid": 1}
    cut = Finding()
    cut.take(ASK, answer('{"name": "a', finish="length"))
    told = report(cut, [], 1.0)
    assert not told["ok"] and (told["cut"], told["invalid"], told["valid"]) == (1, 0, 0)
    plain = Finding()
    plain.take(ASK, answer(json.dumps(VALID["fields"]), accepted=0, rejected=0))
    assert not report(plain, [], 1.0)["ok"]


@pytest.mark.parametrize(
    ("num_refusals", "headers", "is_answered"),
    [
        (0, {}, True),
        (MOST_RETRIES, {"retry-after": "0"}, True),
        (MOST_RETRIES + 1, {"retry-after": "0"}, False),
        (1, {}, False),  # nobody says when to come again
    ],
)
def test_who_is_refused_for_now_asks_again_a_few_times(
    num_refusals: int, headers: dict[str, str], is_answered: bool
) -> None:
    seen = 0

    def respond(request: httpx.Request) -> httpx.Response:
        nonlocal seen
        seen += 1
        if seen <= num_refusals:
            return httpx.Response(503, headers=headers, json={"error": {"code": "not_ready"}})
        chunk = {"choices": [{"index": 0, "delta": {"content": "{}"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        events = [json.dumps(chunk), json.dumps(usage), "[DONE]"]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in events))

    async def ask(finding: Finding) -> StreamRecord:
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(transport=transport, base_url="http://s/v1") as client:
            return await answered(client, "m", ASK, finding)

    finding = Finding()
    if is_answered:
        assert asyncio.run(ask(finding)).finish_reason == "stop"
        assert finding.retried == num_refusals
    else:
        with pytest.raises(BrokenStreamError, match="503"):
            asyncio.run(ask(finding))
