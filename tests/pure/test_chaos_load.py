"""The clients of `dspark chaos` note what became of each request, and retry what a client may retry."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from cluster.chaos import load as load_module
from cluster.chaos.checker import check
from cluster.chaos.history import Event, History
from cluster.chaos.load import Load, Request, UndisturbedError

TOKENS = [4, 5, 6, 7]
REQUEST = Request(0, "hello", len(TOKENS), seed=None)
Answer = Callable[[], httpx.Response]


class Body(httpx.AsyncByteStream):
    """Chunks of an answer; one that is an error is raised, None stays open until the client leaves."""

    def __init__(self, *chunks: str | Exception | None) -> None:
        self.chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            if chunk is None:
                await asyncio.Event().wait()
            elif isinstance(chunk, Exception):
                raise chunk
            else:
                yield chunk.encode()


def tokens(*ids: int) -> str:
    return event({"choices": [{"text": "x", "token_ids": list(ids)}], "usage": None})


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


USAGE = event({"choices": [], "usage": {"completion_tokens": len(TOKENS)}})
DONE = "data: [DONE]\n\n"
WHOLE: tuple[str, ...] = (tokens(4, 5), tokens(6, 7), USAGE, DONE)


def streaming(*chunks: str | Exception | None) -> Answer:
    return lambda: httpx.Response(200, stream=Body(*chunks))


def refusing(status: int, body: str, **headers: str) -> Answer:
    return lambda: httpx.Response(status, text=body, headers=headers)


OURS = json.dumps({"error": {"message": "no target rank is ready", "code": "not_ready"}})


async def events_of(*answers: Answer, hang_up: bool = False) -> list[Event]:
    """The history of one request to an endpoint that gives these answers, one a connection."""
    given = itertools.chain(answers)
    history = History(io.StringIO(), itertools.count().__next__)
    history.note("run", kinds=[], kills=0)
    history.note("expected", request=0, token_ids=TOKENS)
    transport = httpx.MockTransport(lambda _request: next(given)())
    load = Load("http://x/v1", "m", [REQUEST], history, 0, transport)
    asking = asyncio.create_task(load.crowd(1, random.Random(0)))
    while hang_up and not load.num_live:
        await asyncio.sleep(0)
    if hang_up:
        assert len(load.hang_up(random.Random(0))) == load.num_open == 1
    await asking
    assert load.num_open == 0
    history.note("over")
    return history.events


def endings(events: list[Event]) -> list[str]:
    return [event["how"] for event in events if event["event"] == "end"]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "RETRY_S", 0.0)


async def test_a_whole_stream_is_noted_token_by_token() -> None:
    events = await events_of(streaming(*WHOLE))
    assert [e["token_ids"] for e in events if e["event"] == "tokens"] == [[4, 5], [6, 7]]
    assert endings(events) == ["complete"] and check(events).is_clean


@pytest.mark.parametrize(
    ("first", "how"),
    [
        (refusing(503, OURS, **{"retry-after": "0"}), "refused"),
        (refusing(429, OURS, **{"retry-after": "0"}), "refused"),
        (refusing(503, "Service Unavailable"), "status"),
        (streaming(tokens(4), httpx.ReadError("gone")), "broken"),
    ],
)
async def test_what_a_client_may_retry_it_does_on_a_new_stream(first: Answer, how: str) -> None:
    events = await events_of(first, streaming(*WHOLE))
    assert endings(events) == [how, "complete"]
    assert [e["stream"] for e in events if e["event"] == "open"] == ["c0.0", "c0.1"]
    assert check(events).is_clean is (how == "refused")  # the others ask for a dead ingress


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (streaming(tokens(4), event({"error": {"message": "lost"}})), "error"),
        (streaming(tokens(4, 5), tokens(6, 7), USAGE), "cut"),
    ],
)
async def test_a_stream_that_was_broken_off_is_a_violation_and_not_retried(
    answer: Answer, how: str
) -> None:
    events = await events_of(answer)
    assert endings(events) == [how] and not check(events).is_clean


async def test_a_client_that_hangs_up_is_noted_as_such() -> None:
    events = await events_of(streaming(tokens(4), None), hang_up=True)
    assert endings(events) == ["aborted"] and check(events).is_clean


async def test_a_cluster_that_is_broken_before_the_storm_is_found_out() -> None:
    history = History(io.StringIO(), itertools.count().__next__)
    transport = httpx.MockTransport(lambda _request: refusing(500, "oh")())
    load = Load("http://x/v1", "m", [REQUEST], history, 0, transport)
    with pytest.raises(UndisturbedError, match="an undisturbed stream ended"):
        await load.learn()
