"""Reads the history of a storm and says whether every stream survived it. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.chaos.comparison import Difference, compare
from cluster.chaos.history import Event

NO_FAULT = "none"  # the kind that violations outside every fault are counted under
_INTACT = ("complete", "aborted")
# An ingress replica that dies takes its connections with it; so may a proxy that has not noticed yet.
_BROKEN_BY_INGRESS = ("broken", "status")
_WORTH_A_RETRY = (408, 429, 500, 502, 503, 504)
RETRY_AFTER_INGRESS_S = (
    2.0  # so long after its recovery a proxy may still answer for the old replica
)


@dataclass
class _Stream:
    name: str
    request: int
    chain: str
    opened_s: float
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    end: Event | None = None

    @property
    def ended_s(self) -> float:
        return float("inf") if self.end is None else float(self.end["at_s"])


@dataclass
class _FaultSpan:
    number: int
    kind: str
    begins_s: float
    recovered_s: float | None = None
    is_told: bool = False  # why it did not recover

    def is_on(self, from_s: float, to_s: float, slack_s: float = 0.0) -> bool:
        ends_s = float("inf") if self.recovered_s is None else self.recovered_s + slack_s
        return self.begins_s <= to_s and from_s <= ends_s


@dataclass
class Tally:
    """Counts of one kind of fault, or of all."""

    num_asked: int = 0
    num_struck: int = 0
    num_streams: int = 0
    num_failed: int = 0
    num_retryable: int = 0
    num_unrecovered: int = 0
    difference: Difference = field(default_factory=Difference)
    recovery_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)  # for each fault, the longest of a stream

    @property
    def is_clean(self) -> bool:
        return not (self.num_failed or self.num_unrecovered or self.difference)

    def add(self, other: Tally) -> None:
        """Take in another run."""
        self.num_asked += other.num_asked
        self.num_struck += other.num_struck
        self.num_streams += other.num_streams
        self.num_failed += other.num_failed
        self.num_retryable += other.num_retryable
        self.num_unrecovered += other.num_unrecovered
        self.difference += other.difference
        self.recovery_s += other.recovery_s
        self.pause_s += other.pause_s


@dataclass
class Verdict:
    """What a history, or several, came to."""

    total: Tally = field(default_factory=Tally)
    by_kind: dict[str, Tally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one line each
    num_leaks: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    is_whole: bool = True  # the storm ran to its end

    @property
    def is_clean(self) -> bool:
        """Nothing went wrong, and every kind that was asked for has struck: a storm that did nothing proves nothing."""
        has_struck = all(kind.num_struck for kind in self.by_kind.values() if kind.num_asked)
        return self.total.is_clean and not self.num_leaks and self.is_whole and has_struck

    def add(self, other: Verdict) -> None:
        """Take in the verdict on another history."""
        self.total.add(other.total)
        for kind, tally in other.by_kind.items():
            self.by_kind.setdefault(kind, Tally()).add(tally)
        self.problems += other.problems
        self.num_leaks += other.num_leaks
        self.counts += other.counts
        self.is_whole &= other.is_whole


def check(events: Sequence[Event]) -> Verdict:
    """Judge one history.

    A violation is counted under the kind of the newest fault that was on during the stream. Every stream must be
    complete and have the undisturbed tokens, in order. A refusal before the first token is an answer that a client
    retries, so is a connection that broke while an ingress replica was down; the retry must end well.
    """
    return _Reading(events).verdict()


class _Reading:
    def __init__(self, events: Iterable[Event]) -> None:
        self._verdict = Verdict(is_whole=False)
        self._expected: dict[int, list[int]] = {}
        self._streams: dict[str, _Stream] = {}
        self._spans: dict[int, _FaultSpan] = {}
        self._leaks: list[str] = []
        for event in events:
            self._read(event)

    def _read(self, event: Event) -> None:
        at_s = float(event["at_s"])
        match event["event"]:
            case "run":
                for kind in event["kinds"]:
                    self._tally(kind).num_asked += int(event["kills"])
            case "expected":
                self._expected[event["request"]] = event["token_ids"]
            case "open":
                name = event["stream"]
                self._streams[name] = _Stream(name, event["request"], event["chain"], at_s)
            case "tokens":
                stream = self._streams[event["stream"]]
                stream.token_ids += event["token_ids"]
                stream.arrivals_s.append(at_s)
                if stream.end is not None:
                    self._problem(f"{stream.name}: tokens after its end")
                    self._tally(self._kind_of(stream)).num_failed += 1
            case "end":
                self._streams[event["stream"]].end = event
            case "fault":
                self._spans[event["fault"]] = _FaultSpan(event["fault"], event["kind"], at_s)
            case "recovered":
                self._spans[event["fault"]].recovered_s = at_s
            case "unrecovered":
                self._spans[event["fault"]].is_told = True
                self._problem(f"fault {event['fault']}: {event['detail']}")
            case "leak":
                self._leaks.append(str(event["what"]))
            case "counts":
                self._verdict.counts.update(
                    {k: int(v) for k, v in event.items() if k not in ("at_s", "event")}
                )
            case "over":
                self._verdict.is_whole = True

    def verdict(self) -> Verdict:
        verdict = self._verdict
        for stream in self._streams.values():
            self._judge(stream)
        self._judge_chains()
        for span in self._spans.values():
            self._time(span)
        verdict.num_leaks = len(self._leaks)
        verdict.problems += [f"left behind: {what}" for what in self._leaks]
        if not verdict.is_whole:
            self._problem("the storm did not run to its end")
        for tally in verdict.by_kind.values():
            verdict.total.add(tally)
        verdict.total.num_streams = len(self._streams)
        return verdict

    def _judge(self, stream: _Stream) -> None:
        tally = self._tally(self._kind_of(stream))
        for kind in {span.kind for span in self._spans_of(stream)} or {NO_FAULT}:
            self._tally(kind).num_streams += 1
        how = stream.end["how"] if stream.end else "open"
        difference = compare(
            self._expected[stream.request], stream.token_ids, is_whole=how == "complete"
        )
        if difference:
            tally.difference += difference
            self._problem(f"{stream.name} (request {stream.request}): {difference}")
        if failure := self._failure(stream, how):
            tally.num_failed += 1
            self._problem(f"{stream.name}: {failure}")
        elif how not in _INTACT:
            tally.num_retryable += 1

    def _failure(self, stream: _Stream, how: str) -> str:
        """Why the way it ended is a violation; empty when it is not."""
        end: dict[str, Any] = stream.end or {}
        detail = f"{how}: {end.get('detail', '')}"
        if how == "complete":
            told = end.get("completion_tokens")
            is_right = told == len(stream.token_ids) and end.get("detail", "") == ""
            return "" if is_right else f"usage says {told} tokens, {len(stream.token_ids)} came"
        if how == "aborted":
            return ""
        if how == "refused":
            is_clean = end.get("retry_after_s") is not None and not stream.token_ids
            return "" if is_clean else f"{detail} (no clean refusal)"
        if how in _BROKEN_BY_INGRESS and self._ingress_was_down(stream):
            is_worth_it = how == "broken" or end.get("status") in _WORTH_A_RETRY
            return "" if is_worth_it else f"{detail} (nobody would retry that)"
        return detail

    def _judge_chains(self) -> None:
        """A client that was told to retry gets its answer in the end."""
        chains: dict[str, list[_Stream]] = defaultdict(list)
        for stream in self._streams.values():
            chains[stream.chain].append(stream)
        for name, streams in chains.items():
            last = streams[-1]
            if last.end is not None and last.end["how"] not in _INTACT:
                if self._failure(last, last.end["how"]):
                    continue  # counted already
                self._tally(self._kind_of(last)).num_failed += 1
                self._problem(f"chain {name}: never answered after {len(streams)} attempts")

    def _time(self, span: _FaultSpan) -> None:
        tally = self._tally(span.kind)
        tally.num_struck += 1
        if span.recovered_s is None:
            tally.num_unrecovered += 1
            if not span.is_told:
                self._problem(f"fault {span.number} ({span.kind}): never recovered")
        if span.recovered_s is not None:
            tally.recovery_s.append(span.recovered_s - span.begins_s)
        since_s = span.begins_s
        waiting = {
            stream.chain
            for stream in self._streams.values()
            if stream.opened_s <= since_s < stream.ended_s and stream.arrivals_s[:1] <= [since_s]
        }
        # A client that retries waits until its next stream brings a token.
        next_s: dict[str, float] = {}
        for stream in self._streams.values():
            if stream.chain in waiting:
                for at_s in stream.arrivals_s:
                    if at_s >= since_s:
                        next_s[stream.chain] = min(at_s, next_s.get(stream.chain, at_s))
                        break
        if next_s:
            tally.pause_s.append(max(next_s.values()) - since_s)

    def _ingress_was_down(self, stream: _Stream) -> bool:
        return any(
            span.kind == "ingress"
            and span.is_on(stream.opened_s, stream.ended_s, RETRY_AFTER_INGRESS_S)
            for span in self._spans.values()
        )

    def _spans_of(self, stream: _Stream) -> list[_FaultSpan]:
        spans = self._spans.values()
        return [span for span in spans if span.is_on(stream.opened_s, stream.ended_s)]

    def _kind_of(self, stream: _Stream) -> str:
        spans = self._spans_of(stream)
        if stream.end is None:  # later faults have not silenced it
            silent_s = max([stream.opened_s, *stream.arrivals_s])
            spans = [span for span in spans if span.is_on(silent_s, silent_s)] or spans
        return max(spans, key=lambda span: span.begins_s).kind if spans else NO_FAULT

    def _tally(self, kind: str) -> Tally:
        return self._verdict.by_kind.setdefault(kind, Tally())

    def _problem(self, text: str) -> None:
        self._verdict.problems.append(text)
