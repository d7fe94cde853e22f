"""One journal per stream (C8), and the text a client sees of it. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import AdmittedRequest, Endpoint, FinishReason, TokenDelta
from actors.core.sampling import SamplingParams
from cluster.text import Detokenizer

# accepted: drafted, and kept by the target; recovered: the target's own after it refused a draft token; bonus: its own
# after it kept all of them; target: its own where no draft token was verified.
Origin = Literal["accepted", "recovered", "bonus", "target"]


class JournalConflict(Exception):
    """A rank's deltas do not continue what the client already has: the stream must be replayed."""


@dataclass(frozen=True)
class SpeculationCounts:
    """What speculation did for one request: proposed ≥ scheduled ≥ accepted (draft tokens), over its rounds."""

    num_rounds: int = 0
    num_proposed: int = 0
    num_scheduled: int = 0
    num_accepted: int = 0

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            self.num_rounds + other.num_rounds,
            self.num_proposed + other.num_proposed,
            self.num_scheduled + other.num_scheduled,
            self.num_accepted + other.num_accepted,
        )


@dataclass(frozen=True)
class StreamOrder:
    """What a stream was asked for; never changes."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    traceparent: str | None = None
    priority: int = 0
    class_id: int = 0  # index into `policy.classes`
    rank: str | None = None  # the rank it shall be placed on first; None: the best one
    explain: bool = False
    provenance: bool = False  # the journal keeps where each token comes from


def origins_of(before: SpeculationCounts, delta: TokenDelta) -> list[Origin]:
    """Where each token of a delta comes from; `before`: the counts up to it, on the same rank."""
    own = len(delta.token_ids) - (delta.num_accepted - before.num_accepted)
    if own not in (0, 1):
        return ["target"] * len(delta.token_ids)  # repeated: its counts were known before
    num_scheduled = delta.num_scheduled - before.num_scheduled
    num_accepted = delta.num_accepted - before.num_accepted
    last: Origin = "bonus" if num_accepted == num_scheduled else "recovered"
    if not num_scheduled:
        last = "target"
    accepted: list[Origin] = ["accepted"] * num_accepted
    return [*accepted, last] if own else accepted


class StreamJournal:
    """Prompt ids plus every committed id, and who may add to them.

    A delta is accepted only from the current generation and only where it continues the ids held: an overlap that
    repeats them is dropped, a gap or a contradiction raises. Each placement on a rank is a new generation, so whatever
    an earlier rank still says is recognised as late.
    """

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # one a token, where they were asked for
        self.origins: list[Origin] = []  # of each token, where the order asks for it
        self.generation = -1  # not placed yet
        self.finish_reason: FinishReason | None = None
        self.num_late = 0
        self.num_cached = 0  # prompt tokens that the rank which sent the first token had already
        self._earlier = SpeculationCounts()  # of generations that are over
        self._current = SpeculationCounts()

    @property
    def counts(self) -> SpeculationCounts:
        return self._earlier + self._current

    @property
    def num_remaining(self) -> int:
        return self.order.max_new_tokens - len(self.token_ids)

    def place(self, reply_to: Endpoint) -> AdmittedRequest:
        """Start the next generation: prompt plus committed ids, for whichever rank takes the stream now."""
        assert self.finish_reason is None
        self.generation += 1
        self._earlier, self._current = self.counts, SpeculationCounts()
        return self.admission(reply_to)

    def admission(self, reply_to: Endpoint) -> AdmittedRequest:
        """The message of the current generation as it stands; sending it again is harmless."""
        order = self.order
        return AdmittedRequest(
            request_id=order.request_id,
            generation=self.generation,
            reply_to=reply_to,
            prompt_ids=np.array([*order.prompt_ids, *self.token_ids], np.int32),
            num_prior_tokens=len(self.token_ids),
            max_new_tokens=order.max_new_tokens,
            sampling=order.sampling,
            stop_token_ids=order.stop_token_ids,
            priority=order.priority,
            traceparent=order.traceparent,
            class_id=order.class_id,
            explain=order.explain,
        )

    def apply(self, delta: TokenDelta) -> tuple[int, ...]:
        """Add what is new in `delta` and return it; empty for a late or repeated one.

        Raises:
            JournalConflict: a gap before the delta, other tokens than those held, or more than were asked for.
        """
        if delta.generation != self.generation or self.finish_reason is not None:
            self.num_late += 1
            return ()
        held = len(self.token_ids)
        end = delta.first_index + len(delta.token_ids)
        if delta.first_index > held:
            raise JournalConflict(f"tokens {held}..{delta.first_index - 1} are missing")
        repeated = delta.token_ids[: held - delta.first_index]
        if repeated != tuple(self.token_ids[delta.first_index : delta.first_index + len(repeated)]):
            raise JournalConflict(
                f"tokens from {delta.first_index} on differ from those already sent"
            )
        if end > self.order.max_new_tokens:
            raise JournalConflict(f"{end} tokens where {self.order.max_new_tokens} were asked for")
        if end < held and delta.finish_reason in ("stop", "length"):
            raise JournalConflict(f"finished at token {end}, but {held} were already sent")
        wanted = len(delta.token_ids) if self.order.sampling.logprobs is not None else 0
        if len(delta.logprobs) != wanted:
            raise JournalConflict(f"{len(delta.logprobs)} log probabilities, {wanted} expected")
        fresh = delta.token_ids[held - delta.first_index :]
        self.token_ids.extend(fresh)
        self.logprobs.extend(delta.logprobs[held - delta.first_index :])
        if fresh and delta.first_index == 0:
            self.num_cached = delta.num_cached
        if self.order.provenance and fresh:
            self.origins += origins_of(self._current, delta)[-len(fresh) :]
        self._fold(delta)
        if delta.finish_reason in ("stop", "length"):
            self.finish_reason = delta.finish_reason
        return fresh

    def close(self, reason: FinishReason, num_tokens: int | None = None) -> None:
        """End the stream from our side: a stop string after `num_tokens` tokens, a client that left, or the time."""
        self.finish_reason = reason
        if num_tokens is not None:
            del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.origins[num_tokens:]

    def settle(self) -> bool:
        """Whether the ids held already end the stream, so that a lost final delta needs no replay."""
        if self.token_ids and self.token_ids[-1] in self.order.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_remaining <= 0:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _fold(self, delta: TokenDelta) -> None:
        # Cumulative, and deltas may come twice: the largest is the newest, so that counters never fall.
        now = self._current
        self._current = SpeculationCounts(
            max(now.num_rounds, delta.num_rounds),
            max(now.num_proposed, delta.num_proposed),
            max(now.num_scheduled, delta.num_scheduled),
            max(now.num_accepted, delta.num_accepted),
        )


class StopScanner:
    """Finds stop strings in text that comes in pieces; the result does not depend on how it was cut.

    The match that ends first wins, of those the one that starts first. Text that may still become a match is held.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be shown; after a match, nothing more comes."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        window = self._held + text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := window.find(stop)) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return window[:start]
        keep = self._held_len(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """The stream is over: what was held is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _held_len(self, window: str) -> int:
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            if any(stop.startswith(window[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True)
class TextPiece:
    """Text to show, and whether a stop string ended the stream after `num_consumed` of the tokens fed."""

    parts: tuple[str, ...]  # what became certain with each of the tokens consumed
    num_consumed: int
    stopped: bool

    @property
    def text(self) -> str:
        return "".join(self.parts)


class TextStream:
    """The text of one stream: detokenised, without special tokens, cut at stop strings.

    Stop strings are looked for in the text behind the first `min_tokens` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        hidden_ids: frozenset[int],
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._hidden_ids = hidden_ids
        self._num_unscanned = min_tokens

    def feed(self, token_ids: Sequence[int]) -> TextPiece:
        """Token by token, so that a stop string counts the same tokens with and without speculation."""
        pieces: list[str] = []
        for consumed, token_id in enumerate(token_ids, start=1):
            is_scanned = self._num_unscanned <= 0
            self._num_unscanned -= 1
            if token_id in self._hidden_ids:
                pieces.append("")
                continue
            text = self._detokenizer.feed(token_id)
            if not is_scanned:
                pieces.append(text)
                continue
            pieces.append(self._scanner.feed(text))
            if self._scanner.matched is not None:
                return TextPiece(tuple(pieces), consumed, stopped=True)
        return TextPiece(tuple(pieces), len(token_ids), stopped=False)

    def flush(self) -> TextPiece:
        """The end of the stream: an unfinished character and held text come out (or complete a stop string)."""
        text = self._scanner.feed(self._detokenizer.flush())
        if self._scanner.matched is None:
            text += self._scanner.flush()
        return TextPiece((text,), 0, self._scanner.matched is not None)
