"""Brings streams onto ranks and keeps them alive: reserve, admit, follow, replay, abort.

All state belongs to one asyncio loop; a thread polls the link and posts what came to that loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from actors.core.messages import (
    AbortRequest,
    Endpoint,
    LoadView,
    Message,
    ReservationReply,
    RoutingTable,
    Subscribe,
    TokenDelta,
    TokenDeltas,
)
from actors.link import Link
from cluster.live_stream import LiveStream, NoReadyRankError, StreamLimits, refused
from cluster.reservations import ReservationDesk
from cluster.router import Router
from cluster.streams import StreamOrder
from cluster.telemetry import DispatchCounters

logger = logging.getLogger(__name__)

POLL_S = 0.5
HOUSEKEEPING_S = 0.2
HEARTBEAT_S = 1.0
END_STREAMS_S = 3.0
MAX_SHOWN_STREAMS = 50


@dataclass(frozen=True)
class DispatchLimits:
    """Bounds of the front, in seconds."""

    reservation_timeout_s: float = 5.0
    routing_poll_s: float = 0.5
    stream: StreamLimits = field(default_factory=StreamLimits)


class Dispatcher:
    """The ingress replica's side of every stream.

    Args:
        link: this process's inbox; polled from `start` to `stop`.
        routing: answers the supervisor's current table, told the version known here; may raise or be slow, then the
            last table stays.
        limits: bounds in seconds.
    """

    def __init__(
        self, link: Link, routing: Callable[[int], Awaitable[RoutingTable]], limits: DispatchLimits
    ) -> None:
        self.link = link
        self.router = Router()
        self.limits = limits
        self.counters = DispatchCounters()
        self._routing = routing
        self._streams: dict[str, LiveStream] = {}
        self._desk = ReservationDesk(link, limits.reservation_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._routing_was_down = False
        self._refusal = ""  # why nothing new is taken

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def describe_streams(self) -> list[dict[str, Any]]:
        """The newest open streams, for people."""
        return [stream.describe() for stream in [*self._streams.values()][-MAX_SHOWN_STREAMS:]]

    # --- start and stop ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to poll the link and the supervisor."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._poll_link, name="ingress-link", daemon=True)
        self._thread.start()
        for work, period_s in (
            (self._refresh_table, self.limits.routing_poll_s),
            (self._subscribe, HEARTBEAT_S),
            (self._keep_house, HOUSEKEEPING_S),
        ):
            self._tasks.append(asyncio.create_task(self._repeat(work, period_s)))

    async def end_streams(self, reason: str) -> None:
        """Take nothing new, and let what runs end with an error that its client still gets."""
        self._refusal = reason
        for stream in list(self._streams.values()):
            stream.fail(reason, code="shutting_down")
        with suppress(TimeoutError):
            async with asyncio.timeout(END_STREAMS_S):
                while self._streams:
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End all streams and stop; the link is left open for its owner to close."""
        await self.end_streams("the ingress is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stopping.set()
        self.link.wake()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 2 * POLL_S)

    def check_health(self) -> None:
        """Raises RuntimeError when nothing can arrive any more."""
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the thread that polls the link has ended")

    def _poll_link(self) -> None:
        assert self._loop is not None
        while not self._stopping.is_set():
            messages, lost = self.link.poll(POLL_S), self.link.lost()
            if messages or lost:
                with suppress(RuntimeError):  # the loop has just been closed
                    self._loop.call_soon_threadsafe(self.receive, messages, lost)

    async def _repeat(self, work: Callable[[], Awaitable[None]], period_s: float) -> None:
        last_failure = ""
        while True:
            try:
                await work()
                last_failure = ""
            except (
                Exception
            ) as error:  # one bad round must not end the loop that keeps streams alive
                if repr(error) != last_failure:
                    logger.exception("%s failed; going on", work.__name__)
                last_failure = repr(error)
            await asyncio.sleep(period_s)

    # --- streams ----------------------------------------------------------------------------------------------------

    async def open(self, order: StreamOrder, deadline_s: float) -> LiveStream:
        """Place a new stream on the best rank that takes it, until `deadline_s` (loop time). Must be closed.

        Raises:
            OverloadedError: every ready rank refused.
            NoReadyRankError: no rank is ready, or none answered.
        """
        assert order.request_id not in self._streams
        if self._refusal:
            raise NoReadyRankError(self._refusal)
        stream = LiveStream(order, self, self.limits.stream, deadline_s)
        self._streams[order.request_id] = stream
        try:
            await self.place(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    async def place(self, stream: LiveStream) -> None:
        """Reserve on one rank after the other, best first, and admit on the first that grants."""
        loop = asyncio.get_running_loop()
        order = stream.journal.order
        candidates = self.router.candidates(loop.time(), order.rank, order.prompt_ids)
        if not candidates:
            raise NoReadyRankError(self.router.why_unready())
        refusals: list[ReservationReply] = []
        for route in candidates:
            reply = await self._try(stream, route.endpoint)
            if reply is None:
                self.counters.num_unanswered += 1
            elif reply.granted:
                return
            else:
                refusals.append(reply)
        if not refusals:
            raise NoReadyRankError(
                f"none of {len(candidates)} ranks answered within {self.limits.reservation_timeout_s:g} s"
            )
        self.counters.num_refused += 1
        raise refused(refusals)

    async def _try(self, stream: LiveStream, rank: Endpoint) -> ReservationReply | None:
        """Ask one rank, and admit the stream there when it grants."""
        reply: ReservationReply | None = None
        self.router.begin(rank.name)
        try:
            reply = await self._desk.ask(rank, stream.journal)
        finally:
            if reply is None or not reply.granted:
                self.router.end(rank.name)
        if reply is not None and reply.granted:
            self.router.placed(rank.name, stream.journal.order.prompt_ids)
            admission = stream.attach(rank)
            self.link.send(rank, admission)
            self.counters.num_placed += 1
            self.counters.num_replayed += admission.generation > 0
        return reply

    def forget(self, stream: LiveStream) -> None:
        """The stream is over."""
        self._streams.pop(stream.request_id, None)
        self.counters.num_late_deltas += stream.journal.num_late
        self.counters.num_failed += stream.has_failed

    def leave(self, rank: Endpoint, stream: LiveStream, *, is_done: bool) -> None:
        """A stream is on this rank no more; unless the rank has ended it itself, it must stop now."""
        self.router.end(rank.name)
        if not is_done:
            self.abort(rank, stream.request_id, stream.journal.generation)

    def abort(self, to: Endpoint, request_id: str, generation: int) -> None:
        """Have a rank drop a request."""
        self.counters.num_aborted += 1
        self.link.send(to, AbortRequest(request_id, generation))

    # --- what arrives -----------------------------------------------------------------------------------------------

    def receive(self, messages: list[Message], lost: list[Endpoint]) -> None:
        """Sort what the link brought, on the loop; `lost` peers take no messages any more."""
        for stream in list(self._streams.values()) if lost else ():
            stream.unreachable(lost)
        self._desk.give_up_on(lambda rank: rank in lost)
        loop = asyncio.get_running_loop()
        for message in messages:
            match message:
                case TokenDeltas():
                    for delta in message.deltas:
                        self._on_delta(message.rank, delta)
                case ReservationReply():
                    self._desk.take(message)
                case LoadView():
                    self.router.update_load(message, loop.time())
                case _:
                    logger.warning("unexpected %s on the ingress link", type(message).__name__)

    def _on_delta(self, rank: str, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is not None and delta.generation == stream.journal.generation:
            stream.push(delta)
            return
        # Nobody waits for these tokens. The abort that should have ended them may have been lost.
        self.counters.num_stray_deltas += 1
        route = self.router.route(rank)
        if delta.finish_reason is None and route is not None:
            self.abort(route.endpoint, delta.request_id, delta.generation)

    # --- what repeats -----------------------------------------------------------------------------------------------

    async def _refresh_table(self) -> None:
        try:
            async with asyncio.timeout(4 * HEARTBEAT_S):
                table = await self._routing(self.router.table.version)
        except Exception as error:
            self.counters.num_routing_failures += 1
            if not self._routing_was_down:
                logger.warning(
                    "supervisor gives no routing table (%r); keeping the last one", error
                )
            self._routing_was_down = True
            return
        self._routing_was_down = False
        if self.router.update_table(table):
            await self._keep_house()

    async def _subscribe(self) -> None:
        allocator = self.router.table.allocator
        if allocator is not None:
            self.link.send(allocator, Subscribe(self.link.endpoint))

    async def _keep_house(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for stream in list(self._streams.values()):
            stream.check(now_s)
        self._desk.give_up_on(lambda rank: bool(self.rank_is_gone(rank)))

    def rank_is_gone(self, endpoint: Endpoint) -> str:
        """Why this incarnation of a rank can bring no more tokens; empty while it can."""
        route = self.router.route(endpoint.name)
        if route is None:
            return f"rank {endpoint.name} has left the cluster"
        if route.state == "dead":
            return f"rank {endpoint.name} is dead" + (f": {route.reason}" if route.reason else "")
        # A supervisor that has just started may not know the epoch yet.
        if route.endpoint.epoch not in ("", endpoint.epoch):
            return f"rank {endpoint.name} has restarted"
        return ""
