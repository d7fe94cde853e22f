"""`dspark explain` shows one line a round, and says what is missing."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.cli import main
from cluster.client import EndpointClient
from cluster.commands import explain as command
from tests.pure.explained import a_log, a_round

URL = "http://127.0.0.1:8000/v1"


def segment(rank: str, log: dict[str, Any]) -> dict[str, Any]:
    return {**log, "rank": rank}


def answer(*segments: dict[str, Any], num_lost_tokens: int = 0) -> dict[str, Any]:
    choice = {"index": 0, "num_lost_tokens": num_lost_tokens, "segments": list(segments)}
    return {"id": "chatcmpl-1", "choices": [choice], "unanswered": []}


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """Answers are taken from this list."""
    answers: list[httpx.Response] = []

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.raw_path == b"/v1/requests/chatcmpl-1%2F/explain"
        return answers.pop()

    def client(url: str, key_file: str | None) -> EndpointClient:
        assert url == URL and key_file is None
        return EndpointClient(url, httpx.MockTransport(handle))

    monkeypatch.setattr(command, "EndpointClient", client)
    return answers


def run(*more: str) -> int:
    return main(["explain", "chatcmpl-1/", "--url", URL, *more])


def test_a_round_is_a_line_with_bars_cut_where_verification_stopped(
    endpoint: list[httpx.Response], capsys: pytest.CaptureFixture[str]
) -> None:
    no_block = a_round(3, 1, survivals=[0.0, 0.0], num_proposed=0, num_scheduled=0, cut_by="late")
    free = a_round(
        4, 3, max_draft_tokens=2**31 - 1, rule="cold", num_scheduled=2, cut_by="none", explored=True
    )
    log = a_log("chatcmpl-1", 0, 0, a_round(1, 2), no_block, free)
    endpoint.append(httpx.Response(200, json=answer(segment("target-0", log))))
    assert run() == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading == "target-0: 3 rounds, from token 0 on, ended"
    assert lines[0].split() == ["1", "1", "█│▅", "1", "1", "price", "4", "0.25", "lagged", "1"]
    assert lines[1].split()[2:6] == ["-", "0", "0", "late"]
    assert lines[2].split()[2] == "█▅│" and lines[2].split()[6] == "any"


def test_what_went_with_a_rank_is_said_and_segments_are_told_apart(
    endpoint: list[httpx.Response], capsys: pytest.CaptureFixture[str]
) -> None:
    first = {**a_log("chatcmpl-1", 0, 0, a_round(1, 2)), "num_rounds": 9, "has_ended": False}
    second = a_log("chatcmpl-1", 1, 8, a_round(8, 2))
    body = answer(segment("target-0", first), segment("target-1", second), num_lost_tokens=5)
    endpoint.append(httpx.Response(200, json={**body, "unanswered": ["target-2"]}))
    assert run() == 0
    shown = capsys.readouterr().out
    assert "the rounds behind 5 tokens went with their rank" in shown
    assert "target-0: the last 1 of 9 rounds, from token 0 on, running" in shown
    assert "target-1: 1 rounds, from token 8 on, ended" in shown
    assert "did not answer: target-2" in shown


def test_json_is_the_answer_itself(
    endpoint: list[httpx.Response], capsys: pytest.CaptureFixture[str]
) -> None:
    body = answer(segment("target-0", a_log("chatcmpl-1", 0, 0, a_round(1, 2))))
    endpoint.append(httpx.Response(200, json=body))
    assert run("--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == body


def test_a_refusal_is_one_line(
    endpoint: list[httpx.Response], capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"error": {"message": "nothing was kept", "code": "explain_off"}}
    endpoint.append(httpx.Response(404, json=error))
    assert run() == 1
    assert capsys.readouterr().err == "dspark: the endpoint answered 404: nothing was kept\n"


def test_an_endpoint_of_somebody_else_is_named(
    endpoint: list[httpx.Response], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.append(httpx.Response(200, json=[1]))
    assert run() == 1
    assert "does not answer like" in capsys.readouterr().err
