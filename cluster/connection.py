"""The client's side of an answer: server-sent events, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class SseResponse(StreamingResponse):
    """Server-sent events that notice a lost client between two events too, and always clean up.

    Starlette leaves the first to the ASGI server's version, and a generator that was never started cleans up nothing.

    Args:
        events: the encoded events.
        on_close: called once, however the response ends.
    """

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_close = on_close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self.stream_response(send))
        listener = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            writer.cancel()
            try:  # Serve may cancel us here, too
                await asyncio.gather(writer, listener, return_exceptions=True)
            finally:
                self._on_close()
        failure = None if writer.cancelled() else writer.exception()
        if failure is not None and not isinstance(failure, OSError):  # OSError: a closed connection
            raise failure


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
