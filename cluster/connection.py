"""The client's side of an answer: server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
COMMENT = b": the stream is waiting\n\n"  # of server-sent events: no parser shows it to anybody


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class SseResponse(StreamingResponse):
    """Server-sent events that notice a lost client between two events too, and always clean up.

    Starlette leaves the first to the ASGI server's version, and a generator that was never started cleans up nothing.
    While there is no event, as when a stream waits for another rank, comments keep proxies and clients from taking
    the connection for dead.

    Args:
        events: the encoded events.
        on_close: called once, however the response ends.
        keep_alive_s: silence after which a comment is sent, in seconds; 0: never.
    """

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], keep_alive_s: float = 0.0
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self._sent_s: float | None = None  # None: nothing yet

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time

        async def noted(message: Message) -> None:
            await send(message)
            self._sent_s = clock()

        writer = asyncio.ensure_future(self.stream_response(noted))
        listener = asyncio.ensure_future(self.listen_for_disconnect(receive))
        keeper = asyncio.ensure_future(self._keep_alive(noted, clock))
        try:
            await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listener, writer, keeper):
                task.cancel()
            try:  # Serve may cancel us here, too
                await asyncio.gather(writer, listener, keeper, return_exceptions=True)
            finally:
                self._on_close()
        failure = None if writer.cancelled() else writer.exception()
        if failure is not None and not isinstance(failure, OSError):  # OSError: a closed connection
            raise failure

    async def _keep_alive(self, send: Send, clock: Callable[[], float]) -> None:
        while self._keep_alive_s:
            now = clock()
            last = now if self._sent_s is None else self._sent_s
            if now - last < self._keep_alive_s:
                await asyncio.sleep(last + self._keep_alive_s - now)
            else:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def unless_disconnected(
    request: Request, work: Awaitable[T], put_back: Callable[[T], None] = lambda _: None
) -> T:
    """The result of `work`, which is cancelled when the client goes, or when Serve cancels its request.

    Args:
        put_back: gets the result if there is one and nobody takes it any more: the end of the client, or of the
            request, may come at any moment.

    Raises:
        ClientGone: it did.
    """

    async def until_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def abandon(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            put_back(task.result())

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        watcher.cancel()
        await asyncio.wait({watcher})  # nobody else may receive before it has let go
        if not watcher.cancelled():
            raise ClientGone
        return task.result()  # and nothing may be awaited from here on
    except BaseException:
        task.cancel()
        task.add_done_callback(abandon)
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
        raise
