"""What the command line makes of the endpoint's answers, and of none."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster import chat as chat_module
from cluster import demo as demo_module
from cluster.chat import converse
from cluster.cli import main
from cluster.client import Answer, Chunk, EndpointClient, collect
from cluster.commands import control
from cluster.console import CommandError, table
from cluster.run_state import RunState, register

URL = "http://127.0.0.1:8000/v1"
MODEL = "smollm2"
Handler = Callable[[httpx.Request], httpx.Response]


def events(*items: dict[str, Any] | str) -> httpx.Response:
    lines = [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items]
    return httpx.Response(200, text=": comment\n\n" + "".join(lines))


def delta(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None}


def usage(tokens: int, rounds: int, accepted: int) -> dict[str, Any]:
    counts = {"num_rounds": rounds, "num_accepted": accepted}
    return {"choices": [], "usage": {"completion_tokens": tokens, "dspark": counts}}


def endpoint(
    request: httpx.Request, *, texts: Callable[[dict[str, Any]], str] = lambda _: "Hi there"
) -> httpx.Response:
    """A small endpoint: with speculation 6 tokens in 2 rounds, without 6 rounds."""
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": MODEL}]})
    if request.url.path == "/health":
        rank = {"name": "target-0", "state": "ready", "num_running": 0}
        other = {"name": "drafter-0", "state": "ready", "revision": 2}
        health = {"status": "unavailable", "ranks": [rank], "others": [other]}
        return httpx.Response(503, json=health)
    body = json.loads(request.content)
    on = body["dspark"]["speculation"]
    counts = usage(6, 2, 4) if on else usage(6, 6, 0)
    return events(*map(delta, texts(body).split(" ")), delta("", "stop"), counts, "[DONE]")


def client(handler: Handler = endpoint) -> EndpointClient:
    return EndpointClient(URL, httpx.MockTransport(handler))


def test_a_stream_becomes_text_counts_and_cost() -> None:
    shown: list[str] = []
    answer = collect(client().stream_chat(MODEL, []), shown.append)
    assert answer.text == "Hithere"
    assert shown == ["Hi", "there"]
    assert (answer.finish_reason, answer.completion_tokens) == ("stop", 6)
    assert answer.acceptance_length == 3.0  # (4 accepted + 2 bonus) / 2 rounds
    assert answer.tokens_per_s == 6 / answer.elapsed_s > 0


def test_without_rounds_the_acceptance_length_is_one() -> None:
    assert Answer().acceptance_length == 1.0
    assert Answer().tokens_per_s == 0.0


def test_the_request_asks_for_what_was_set_and_omits_what_was_not() -> None:
    seen: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return endpoint(request)

    stream = client(handler).stream_chat(MODEL, [], speculation=False, temperature=0, seed=None)
    collect(stream, lambda _: None)
    assert seen[0]["dspark"] == {"speculation": False}
    assert seen[0]["temperature"] == 0
    assert "seed" not in seen[0]
    assert seen[0]["stream_options"] == {"include_usage": True}


def test_counts_beside_the_usage_are_read_too() -> None:
    last = {"choices": [], "usage": {"completion_tokens": 3}, "dspark": {"num_rounds": 3}}
    answer = collect(
        client(lambda _: events(last, "[DONE]")).stream_chat(MODEL, []), lambda _: None
    )
    assert (answer.completion_tokens, answer.num_rounds) == (3, 3)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (events(delta("a"), {"error": {"message": "rank lost"}}), "rank lost"),
        (events(delta("a")), "cut before its end"),
        (httpx.Response(429, json={"error": {"message": "too busy"}}), "429: too busy"),
        (httpx.Response(502, text="bad gateway"), "502: bad gateway"),
    ],
)
def test_a_stream_that_fails_is_an_error_not_a_short_answer(
    response: httpx.Response, message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        collect(client(lambda _: response).stream_chat(MODEL, []), lambda _: None)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (httpx.ConnectError("refused"), "start a cluster with `dspark serve`"),
        (httpx.ReadTimeout("slow"), "silent for 120 s"),
        (httpx.RemoteProtocolError("peer closed"), "broke .peer closed.; see `dspark status`"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_one_line(failure: Exception, message: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise failure

    for ask in (
        lambda c: c.models(),
        lambda c: c.health(),
        lambda c: list(c.stream_chat(MODEL, [])),
    ):
        with pytest.raises(CommandError, match=message):
            ask(client(handler))


@pytest.mark.parametrize(
    "response", [httpx.Response(200, text="<html>"), httpx.Response(200, json=[1])]
)
def test_another_kind_of_server_is_recognised(response: httpx.Response) -> None:
    with pytest.raises(CommandError, match="does not answer like an OpenAI endpoint"):
        client(lambda _: response).models()


def test_a_wrong_model_name_lists_the_right_ones() -> None:
    assert client().choose_model(None) == client().choose_model(MODEL) == MODEL
    with pytest.raises(CommandError, match="model 'gpt' is not served here; served: smollm2"):
        client().choose_model("gpt")
    empty = client(lambda _: httpx.Response(200, json={"data": []}))
    with pytest.raises(CommandError, match="serves no model yet"):
        empty.choose_model(None)


def test_status_shows_a_cluster_that_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = httpx.MockTransport(endpoint)
    monkeypatch.setattr(control, "EndpointClient", partial(EndpointClient, transport=transport))
    path = tmp_path / "running.json"
    with register(path, RunState(1, "ready", URL, MODEL, "fast", 0.0)):
        assert main(["status", "--state", str(path)]) == 0
        text = capsys.readouterr().out
        assert main(["status", "--state", str(path), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    assert "unavailable" in text
    assert "target-0" in text
    assert ["drafter-0", "ready", "2"] in [line.split() for line in text.splitlines()]
    assert report["running"]
    assert report["health"]["ranks"][0]["name"] == "target-0"


def test_a_conversation_remembers_until_reset() -> None:
    asked: list[list[str]] = []

    def ask(messages: list[dict[str, str]]) -> Answer:
        asked.append([message["content"] for message in messages])
        return Answer(text=f"answer {len(asked)}")

    turns = iter(["one", "", "two", "/help", "/reset", "three", "/quit", "four"])
    converse(turns, ask, system="be brief")
    assert asked == [
        ["be brief", "one"],
        ["be brief", "one", "answer 1", "two"],
        ["be brief", "three"],
    ]


def test_chat_reads_turns_from_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = httpx.MockTransport(endpoint)
    monkeypatch.setattr(chat_module, "EndpointClient", partial(EndpointClient, transport=transport))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand again\n"))
    assert main(["chat", "--url", URL]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hithere\nHithere\n"
    assert "3.00 tokens a round" in printed.err


def test_an_interrupt_keeps_what_was_said_and_goes_on() -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Chunk]:
        yield Chunk(text="half")
        raise KeyboardInterrupt

    fake = SimpleNamespace(stream_chat=interrupted)
    arguments = argparse.Namespace(no_speculation=False, temperature=0, max_tokens=4, seed=None)
    answer = chat_module._asker(fake, MODEL, arguments)([])  # type: ignore[arg-type]
    assert answer.text == "half"


def run_demo(
    handler: Handler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *extra: str,
    numerics: str = "reproducible",
) -> int:
    transport = httpx.MockTransport(handler)
    monkeypatch.setattr(demo_module, "EndpointClient", partial(EndpointClient, transport=transport))
    path = tmp_path / "running.json"
    with register(path, RunState(1, "ready", URL, MODEL, numerics, 0.0)):
        return main(["demo", "--state", str(path), "--num-predict", "6", *extra])


def test_the_demo_reports_what_others_rely_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_demo(endpoint, tmp_path, monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["acceptance_length"] == 3.0
    assert report["greedy_equal"] is True
    assert set(report["tokens_per_s"]) == {"dspark", "none"}
    assert {row["kind"] for row in report["prompts"]} == {"code", "math", "chat", "prose"}
    assert all(row["tokens"] == 6 and row["equal"] for row in report["prompts"])
    assert "fast" not in report


@pytest.mark.parametrize(
    ("options", "started"),
    [
        ([], ["reproducible", "fast"]),
        (["--fast"], ["reproducible", "fast"]),
        (["--no-fast"], ["reproducible"]),
    ],
)
def test_without_a_running_cluster_the_demo_starts_its_own(
    options: list[str],
    started: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    @contextmanager
    def local(_: argparse.Namespace, override: str) -> Iterator[str]:
        seen.append(override.removeprefix("model.numerics="))
        yield URL

    transport = httpx.MockTransport(endpoint)
    monkeypatch.setattr(demo_module, "EndpointClient", partial(EndpointClient, transport=transport))
    monkeypatch.setattr(demo_module, "local_cluster", local)
    assert main(["demo", "--state", str(tmp_path / "none"), "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert seen == started
    assert report["numerics"] == "reproducible"
    assert ("fast" in report) == ("fast" in started)
    if "fast" in started:
        assert set(report["fast"]) == {"dspark", "none", "greedy_equal"}


@pytest.mark.parametrize(("numerics", "code"), [("reproducible", 1), ("fast", 0)])
def test_greedy_texts_that_differ_are_a_failure_where_identity_is_promised(
    numerics: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def texts(body: dict[str, Any]) -> str:
        odd = "lighthouse" in body["messages"][0]["content"] and body["dspark"]["speculation"]
        return "another text" if odd else "the text"

    handler = partial(endpoint, texts=texts)
    assert run_demo(handler, tmp_path, monkeypatch, numerics=numerics) == code
    assert capsys.readouterr().out.count("NO") == 2  # the prompt and the total


def test_a_table_pads_text_left_and_numbers_right() -> None:
    assert table(["kind", "n"], [["a", "5"], ["bb", "10"]]) == "kind  n\na      5\nbb    10"
