"""What the front counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

FRONT_FORGOTTEN_S = 30.0
LATENCY_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """The upper bounds, the count of each bucket (the last one is open), and the sum of all values."""
        return {"bounds": [*self._bounds], "counts": [*self._counts], "sum": self._sum}


@dataclass
class FrontMetrics:
    """Counts of one ingress replica since its start; they only grow."""

    responses: Counter[int] = field(default_factory=Counter)  # by HTTP status
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    num_disconnected: int = 0
    num_ignored_fields: int = 0  # of bodies: nobody here knows them, and they change no answer
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    token_interval_s: Histogram = field(default_factory=Histogram)  # mean of a request
    largest_gap_s: Histogram = field(default_factory=Histogram)  # between two updates of a request
    duration_s: Histogram = field(default_factory=Histogram)

    def finish(self, reason: str, num_prompt: int, num_generated: int, duration_s: float) -> None:
        """A stream is over."""
        self.finished[reason] += 1
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        self.duration_s.observe(duration_s)

    def snapshot(self) -> dict[str, Any]:
        """A copy in plain numbers, for other processes."""
        return {
            name: value.snapshot() if isinstance(value, Histogram) else deepcopy(value)
            for name, value in vars(self).items()
        }


@dataclass
class DispatchCounters:
    """What happened since the start; every count only grows."""

    num_placed: int = 0
    num_replayed: int = 0
    num_failed: int = 0  # streams that ended with an error their client saw
    num_refused: int = 0
    num_unanswered: int = 0
    num_aborted: int = 0
    num_late_deltas: int = 0
    num_stray_deltas: int = 0
    num_routing_failures: int = 0


class FrontShelf:
    """Counters of every ingress replica that has left some lately."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}

    def note(self, ingress: str, counters: dict[str, Any], now_s: float) -> None:
        self._heard[ingress] = now_s, counters

    def known(self, now_s: float) -> dict[str, dict[str, Any]]:
        """By replica; those of a silent one are not told any more."""
        oldest = now_s - FRONT_FORGOTTEN_S
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= oldest}
        return {name: counters for name, (_, counters) in self._heard.items()}
