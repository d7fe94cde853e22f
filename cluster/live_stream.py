"""One stream while it runs: its journal, the rank that serves it now, and what to do when that rank fails."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from actors.core.messages import (
    AdmittedRequest,
    Endpoint,
    FinishReason,
    ReservationReply,
    TokenDelta,
)
from actors.link import Link
from cluster.streams import JournalConflict, StreamJournal, StreamOrder

logger = logging.getLogger(__name__)

RETRY_S = 0.25  # between two attempts to place a lost stream
READMIT_S = 5.0  # silence before the first token after which the admission is sent again


class PlacementError(Exception):
    """No rank takes the stream."""


class NoReadyRankError(PlacementError):
    """Nobody is ready, or nobody answered: HTTP 503."""


class OverloadedError(PlacementError):
    """Every ready rank refused: HTTP 429."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NeverFitsError(PlacementError):
    """No rank could hold the request even when idle: HTTP 400."""


def refused(refusals: Sequence[ReservationReply]) -> PlacementError:
    """What it means that every rank refused. A refusal without a time to try again is final."""
    reasons = ", ".join(f"{reply.rank}: {reply.reason}" for reply in refusals)
    waits_s = [reply.retry_after_s for reply in refusals if reply.retry_after_s > 0]
    if not waits_s:
        return NeverFitsError(f"no rank can hold this request: {reasons}")
    return OverloadedError(f"every rank refused: {reasons}", min(waits_s))


class StreamError(Exception):
    """The stream cannot go on; the client is told why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of one stream."""

    stall_timeout_s: float = 30.0
    replay_timeout_s: float = 60.0
    max_fruitless_replays: int = 5


@dataclass(frozen=True)
class Update:
    """Tokens that were committed since the last update, and how the stream ended if it did."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class StreamHost(Protocol):
    """What a stream needs of the dispatcher."""

    link: Link

    async def place(self, stream: LiveStream) -> None: ...
    def forget(self, stream: LiveStream) -> None: ...
    def leave(self, rank: Endpoint, stream: LiveStream, *, is_done: bool) -> None: ...
    def rank_is_gone(self, endpoint: Endpoint) -> str: ...


class LiveStream:
    """Fed by the dispatcher (`push`, `check`), read by the HTTP response (`updates`), ended by `close`."""

    def __init__(
        self, order: StreamOrder, host: StreamHost, limits: StreamLimits, deadline_s: float
    ) -> None:
        self.request_id = order.request_id
        self.journal = StreamJournal(order)
        self.rank: Endpoint | None = None
        self._host = host
        self._limits = limits
        self._deadline_s = deadline_s
        self._deltas: deque[TokenDelta] = deque()
        self._wake = asyncio.Event()
        self._lost = ""  # why the rank no longer serves this stream
        self._failure: StreamError | None = None
        self._heard_s = 0.0
        self._heard_tokens = False
        self._rank_is_done = False  # the rank itself ended this generation: nothing to abort
        self._num_fruitless = 0  # placements in a row that brought no token
        self.has_failed = False  # its client was told of an error
        self._closed = False

    # --- fed by the dispatcher --------------------------------------------------------------------------------------

    def attach(self, rank: Endpoint) -> AdmittedRequest:
        """A rank granted a reservation: it serves the stream from now on, as a new generation."""
        self.rank = rank
        self._lost = ""
        self._rank_is_done = False
        self._deltas.clear()
        self._heard_s = asyncio.get_running_loop().time()
        self._heard_tokens = False
        return self.journal.place(self._host.link.endpoint)

    def push(self, delta: TokenDelta) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._heard_tokens = True
        self._deltas.append(delta)
        self._wake.set()

    def check(self, now_s: float) -> None:
        """Look at the clock and at the rank; called a few times a second."""
        if now_s >= self._deadline_s:
            self.fail("the request took longer than it may", code="request_timeout")
        elif self.rank is not None and not self._lost:
            self._check_rank(self.rank, now_s)

    def unreachable(self, peers: Sequence[Endpoint]) -> None:
        """The link cannot reach these any more: what they still say is late, what they have not said is lost."""
        if self.rank in peers and not self._rank_is_done:
            self._lose(f"rank {self._rank_name} is unreachable")

    def fail(self, message: str, code: str = "stream_failed") -> None:
        """End the stream with an error."""
        self._failure = self._failure or StreamError(message, code)
        self._wake.set()

    def _check_rank(self, rank: Endpoint, now_s: float) -> None:
        gone = self._host.rank_is_gone(rank)
        silence_s = now_s - self._heard_s
        if gone:
            self._lose(gone)
        elif self._heard_tokens and silence_s > self._limits.stall_timeout_s:
            self._lose(f"rank {rank.name} has been silent for {silence_s:.1f} s")
        elif not self._heard_tokens and silence_s > READMIT_S:
            # It may wait in the rank's queue, or its admission was lost: repeating it is harmless.
            self._heard_s = now_s
            self._host.link.send(rank, self.journal.admission(self._host.link.endpoint))

    def _lose(self, reason: str) -> None:
        self._lost = reason
        self._wake.set()

    def describe(self) -> dict[str, Any]:
        """Where it runs and how far it is; JSON-able."""
        journal = self.journal
        return {
            "request_id": self.request_id,
            "rank": self._rank_name,
            "num_tokens": len(journal.token_ids),
            "max_new_tokens": journal.order.max_new_tokens,
            "generation": journal.generation,
            **asdict(journal.counts),
        }

    # --- read by the response ---------------------------------------------------------------------------------------

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Everything new since the last update, until the stream ends.

        Raises:
            StreamError: the stream cannot go on.
        """
        while True:
            fresh = self._take()
            if fresh or self.journal.finish_reason is not None:
                yield Update(fresh, self.journal.finish_reason)
            if self.journal.finish_reason is not None:
                return
            try:
                if self._failure is not None:
                    raise self._failure
                if self._lost:
                    await self._replay()
                    continue
            except StreamError:
                self.has_failed = True
                raise
            if not self._deltas:
                self._wake.clear()
                await self._wake.wait()

    def close(self) -> None:
        """The response is over, whatever the reason: free what the rank still holds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._leave_rank()
        self._host.forget(self)

    def _take(self) -> tuple[int, ...]:
        fresh: list[int] = []
        while self._deltas and not self._lost:
            delta = self._deltas.popleft()
            try:
                fresh += self.journal.apply(delta)
            except JournalConflict as conflict:
                self._lost = f"rank {self._rank_name} parted from the journal: {conflict}"
                break
            if delta.finish_reason is not None:
                self._rank_is_done = True
            if delta.finish_reason == "abort":
                self._num_fruitless -= 1  # a rank that drains gives it back: nobody's failure
            if delta.finish_reason in ("abort", "error"):
                self._lost = f"rank {self._rank_name} gave the request up: {delta.error or delta.finish_reason}"
        if fresh:
            self._num_fruitless = 0
        return tuple(fresh)

    async def _replay(self) -> None:
        """Go on elsewhere (or there again, when it is back): the client sees a pause."""
        reason = self._lost
        self._leave_rank()
        if self.journal.settle():
            return
        self._num_fruitless += 1
        if self._num_fruitless > self._limits.max_fruitless_replays:
            raise StreamError(
                f"given up after {self._limits.max_fruitless_replays} attempts to go on without a new token "
                f"(ingress.max_fruitless_replays): {reason}",
                "stream_lost",
            )
        logger.warning(
            "replaying %s from token %d: %s", self.request_id, len(self.journal.token_ids), reason
        )
        give_up_s = asyncio.get_running_loop().time() + self._limits.replay_timeout_s
        obstacle: PlacementError | None = None
        try:
            async with asyncio.timeout_at(min(give_up_s, self._deadline_s)):
                while self._failure is None:
                    try:
                        await self._host.place(self)
                        return
                    except PlacementError as error:
                        obstacle = error
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise StreamError(
                f"the stream lost its rank ({reason}) and found no other in time: {obstacle}",
                "stream_lost",
            ) from obstacle

    def _leave_rank(self) -> None:
        if self.rank is not None:
            self._host.leave(self.rank, self, is_done=self._rank_is_done)
        self.rank = None

    @property
    def _rank_name(self) -> str:
        return self.rank.name if self.rank is not None else "(none)"
