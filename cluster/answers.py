"""One answer per prompt: the text of a live stream, piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import FinishReason
from cluster.dispatcher import Dispatcher
from cluster.jobs import Job
from cluster.live_stream import LiveStream
from cluster.request_trace import Outcome, RequestTrace
from cluster.streams import Origin, SpeculationCounts
from cluster.telemetry import FrontMetrics
from cluster.text import TextCodec

Provenance = tuple[tuple[str, Origin], ...]


@dataclass(frozen=True)
class Piece:
    """Text that became certain, and how the answer ended if it did."""

    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] = ()  # those read since the last piece
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where they were asked for
    provenance: Provenance = ()  # the text again, by token, where it was asked for


class Answer:
    """A live stream as text. `close` frees everything, at any time."""

    def __init__(
        self,
        job: Job,
        live: LiveStream,
        codec: TextCodec,
        metrics: FrontMetrics,
        trace: RequestTrace,
    ) -> None:
        self.job = job
        self._live = live
        self._trace = trace
        self._text = job.text_stream(codec)
        self._num_shown = 0  # tokens handed on in pieces
        self._metrics = metrics
        self._opened_s = trace.begun_s
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._largest_gap_s = 0.0
        self._closed = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._live.journal.order.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self._live.journal.num_cached

    @property
    def num_tokens(self) -> int:
        return len(self._live.journal.token_ids)

    @property
    def finish_reason(self) -> FinishReason:
        """How it ended; "abort" for one that was closed before its end."""
        return self._live.journal.finish_reason or "abort"

    @property
    def counts(self) -> SpeculationCounts:
        return self._live.journal.counts

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self._first_token_s is None else self._first_token_s - self._opened_s

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Everything there is to show; the last piece has a finish reason.

        Raises:
            StreamError: the stream cannot go on.
        """
        journal, num_seen = self._live.journal, 0
        async with aclosing(self._live.updates()) as updates:
            async for update in updates:
                self._clock_tokens()
                with self._trace.detokenising():
                    shown = self._text.feed(update.token_ids)
                fresh = update.token_ids[: shown.num_consumed]
                origins = journal.origins[num_seen : num_seen + len(fresh)]
                num_seen += len(update.token_ids)
                provenance = tuple(zip(shown.parts, origins, strict=False))
                if shown.stopped:
                    surplus = len(update.token_ids) - shown.num_consumed
                    journal.close("stop", len(journal.token_ids) - surplus)
                    self.close()  # the rank is still generating
                    yield self._piece(shown.text, "stop", fresh, provenance)
                    return
                if update.finish_reason is None:
                    if shown.text or self.job.shows_tokens:
                        yield self._piece(shown.text, None, fresh, provenance)
                    continue
                rest = self._text.flush()
                reason = "stop" if rest.stopped else update.finish_reason
                if rest.text and journal.origins:
                    provenance = (*provenance, (rest.text, journal.origins[-1]))
                yield self._piece(shown.text + rest.text, reason, fresh, provenance)

    def _piece(
        self,
        text: str,
        reason: FinishReason | None,
        fresh: tuple[int, ...],
        provenance: Provenance,
    ) -> Piece:
        if not self.job.shows_tokens:
            return Piece(text, reason, provenance=provenance)
        start = self._num_shown
        self._num_shown += len(fresh)
        logprobs = tuple(self._live.journal.logprobs[start : self._num_shown])
        return Piece(text, reason, fresh, logprobs, provenance)

    def close(self) -> None:
        """The answer is over, whatever the reason. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._live.close()
        now_s = time.monotonic()
        self._metrics.finish(
            self.finish_reason, self.num_prompt_tokens, self.num_tokens, now_s - self._opened_s
        )
        if self._first_token_s is not None and self.num_tokens > 1:
            elapsed_s = now_s - self._first_token_s
            self._metrics.token_interval_s.observe(elapsed_s / (self.num_tokens - 1))
            self._metrics.largest_gap_s.observe(self._largest_gap_s)

    def _clock_tokens(self) -> None:
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._metrics.first_token_s.observe(now_s - self._opened_s)
        else:
            self._largest_gap_s = max(self._largest_gap_s, now_s - self._last_token_s)
        self._last_token_s = now_s


def close_all(answers: Sequence[Answer]) -> None:
    """Free what they hold."""
    for answer in answers:
        answer.close()


async def open_answers(
    jobs: Sequence[Job],
    dispatcher: Dispatcher,
    codec: TextCodec,
    metrics: FrontMetrics,
    trace: RequestTrace,
    timeout_s: float,
) -> list[Answer]:
    """Place all jobs, or none.

    Raises:
        PlacementError: a job found no rank; those placed before it are aborted.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    answers: list[Answer] = []
    try:
        for job in jobs:
            live = await dispatcher.open(job.order, deadline_s)
            answers.append(Answer(job, live, codec, metrics, trace))
    except BaseException:
        close_all(answers)
        raise
    return answers


def outcome_of(answers: Sequence[Answer]) -> Outcome:
    """How a response ended, for its trace."""
    return Outcome(
        [answer.finish_reason for answer in answers],
        sum(answer.num_prompt_tokens for answer in answers),
        sum(answer.num_tokens for answer in answers),
        min((a.first_token_s for a in answers if a.first_token_s is not None), default=None),
    )


async def merged_pieces(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all answers as they come, with the index of the answer.

    Raises:
        StreamError: one of the streams cannot go on; the others are not waited for.
    """
    if len(answers) == 1:
        async with aclosing(answers[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def pump(index: int, answer: Answer) -> None:
        try:
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
        except Exception as error:  # whatever it is, the reader must not wait for this answer
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    num_running = len(answers)
    try:
        while num_running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_running -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
