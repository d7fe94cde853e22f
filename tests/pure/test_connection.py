"""A client or its request may end at any moment of an answer: whatever was opened for it is closed, once.

Found by `dspark chaos`: thirteen clients hung up while their streams were being placed, nine streams stayed open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cluster.connection import COMMENT, ClientGone, SseResponse, unless_disconnected

Message = dict[str, Any]


class Connection:
    """Of a client that leaves when it is told to."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self.num_receiving = 0

    async def receive(self) -> Message:
        self.num_receiving += 1
        assert self.num_receiving == 1, "two receive from one connection"
        try:
            await self.has_left.wait()
        finally:
            self.num_receiving -= 1
        return {"type": "http.disconnect"}


async def opened_after(turns: int) -> str:
    for _ in range(turns):
        await asyncio.sleep(0)
    return "stream"


async def outcome(
    run: Callable[[Connection, list[str]], Awaitable[Any]], *, turn: int, how: str
) -> tuple[Any, list[str]]:
    """What came of a request whose client leaves, or which is cancelled, after so many turns of the loop; and what
    was put back."""
    connection, put_back = Connection(), list[str]()
    task = asyncio.ensure_future(run(connection, put_back))
    for _ in range(turn):
        await asyncio.sleep(0)
    if how == "leaves":
        connection.has_left.set()
    else:
        task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert connection.num_receiving == 0
    return ended, put_back


@pytest.mark.parametrize("how", ["leaves", "is cancelled", "both"])
async def test_what_was_opened_is_handed_over_or_put_back_whenever_the_end_comes(how: str) -> None:
    async def run(connection: Connection, put_back: list[str]) -> str:
        request: Any = connection
        if how == "both":
            connection.has_left.set()
        return await unless_disconnected(request, opened_after(4), put_back.append)

    seen = set()
    for turn in range(14):
        ended, put_back = await outcome(run, turn=turn, how=how)
        seen.add(type(ended))
        if ended == "stream":
            assert put_back == []
        else:
            assert isinstance(ended, ClientGone | asyncio.CancelledError)
            # It was never opened, or it was closed.
            assert put_back in ([], ["stream"])
    assert len(seen) > 1 or how == "both"


@pytest.mark.parametrize("cancelled_at", range(1, 12))
async def test_a_result_that_a_cancelled_request_cannot_take_is_put_back(cancelled_at: int) -> None:
    """The request is cancelled after its stream was opened, and before it has taken it."""
    is_open, put_back = [False], list[str]()

    async def opening() -> str:
        await asyncio.sleep(0)
        is_open[0] = True
        return "stream"

    request: Any = Connection()
    task = asyncio.ensure_future(unless_disconnected(request, opening(), put_back.append))
    for _ in range(cancelled_at):
        await asyncio.sleep(0)
    task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    if is_open[0]:
        assert (ended == "stream") is (put_back == [])
        assert put_back in ([], ["stream"])


async def test_an_error_while_opening_is_the_callers() -> None:
    async def failing() -> str:
        raise LookupError("no rank")

    request: Any = Connection()
    with pytest.raises(LookupError, match="no rank"):
        await unless_disconnected(request, failing())


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
async def test_a_streamed_answer_is_closed_once_whenever_its_end_comes(how: str, turn: int) -> None:
    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)  # it takes its time

    async def send(_message: Any) -> None:
        await asyncio.sleep(0)

    async def run(connection: Connection, closed: list[str]) -> None:
        response = SseResponse(events(), lambda: closed.append("closed"))
        await response({"type": "http"}, connection.receive, send)

    _, closed = await outcome(run, turn=turn + 1, how=how)
    assert closed == ["closed"]


async def test_a_streamed_answer_that_is_cancelled_while_it_ends_is_closed_all_the_same() -> None:
    closed, connection, is_ending = list[str](), Connection(), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)
        finally:
            is_ending.set()
            await asyncio.sleep(0.01)

    async def send(_message: Any) -> None:
        await asyncio.sleep(0)

    response = SseResponse(events(), lambda: closed.append("closed"))
    task = asyncio.ensure_future(response({"type": "http"}, connection.receive, send))
    await asyncio.sleep(0.01)
    connection.has_left.set()
    await asyncio.wait(
        {task, asyncio.ensure_future(is_ending.wait())}, return_when="FIRST_COMPLETED"
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed == ["closed"]


async def test_while_a_stream_waits_comments_keep_its_connection() -> None:
    sent, enough = list[Message](), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"
        await enough.wait()
        yield b"data: y\n\n"

    async def send(message: Message) -> None:
        sent.append(message)
        if [one.get("body") for one in sent].count(COMMENT) == 3:
            enough.set()

    response = SseResponse(events(), lambda: None, keep_alive_s=0.001)
    await response({"type": "http"}, Connection().receive, send)
    assert sent[0]["type"] == "http.response.start"
    bodies = [one["body"] for one in sent[1:]]
    assert bodies[0] == b"data: x\n\n" and set(bodies[1:4]) == {COMMENT}
    assert [body for body in bodies if body != COMMENT] == [b"data: x\n\n", b"data: y\n\n", b""]
    assert bodies[-1] == b"" and not sent[-1]["more_body"]
    assert all(one["more_body"] for one in sent[1:-1])


async def test_nothing_is_sent_before_the_headers_are() -> None:
    sent, is_closed = list[Message](), asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(0.02)
        sent.append(message)

    response = SseResponse(events(), is_closed.set, keep_alive_s=0.001)
    await response({"type": "http"}, Connection().receive, send)
    assert sent[0]["type"] == "http.response.start" and is_closed.is_set()


async def test_without_a_time_no_comment_is_ever_sent() -> None:
    sent = list[Message]()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: x\n\n"
        await asyncio.sleep(0.02)

    async def send(message: Message) -> None:
        sent.append(message)

    await SseResponse(events(), lambda: None)({"type": "http"}, Connection().receive, send)
    assert [one["body"] for one in sent[1:]] == [b"data: x\n\n", b""]
