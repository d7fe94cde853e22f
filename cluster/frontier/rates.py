"""From the streams of one cell to its rates. Pure; times in seconds since the cell began.

Only the steady window counts for the node: from the moment every slot of the closed loop has its first token to the
moment the first slot finds no more requests. Tokens come from `usage`; within a stream they are taken as evenly spread
from the first text to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


class WindowError(ValueError):
    """There was no time at which all slots were busy."""


@dataclass(frozen=True)
class StreamSample:
    """One stream. `num_rounds`, `num_scheduled` and `num_accepted` are zero where the server does not count them."""

    index: int  # in the list of requests
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    completion_tokens: int = 0
    num_rounds: int = 0
    num_scheduled: int = 0
    num_accepted: int = 0
    digest: str = ""  # of text, length and ending
    error: str = ""

    def tokens_until(self, at_s: float) -> float:
        """Tokens that had come by then."""
        if at_s < self.first_s or not self.completion_tokens:
            return 0.0
        if at_s >= self.last_s:
            return float(self.completion_tokens)
        return 1 + (self.completion_tokens - 1) * (at_s - self.first_s) / (
            self.last_s - self.first_s
        )

    def share_within(self, begin_s: float, end_s: float) -> float:
        """Of its time from the first text to the last."""
        length = self.last_s - self.first_s
        inside = min(self.last_s, end_s) - max(self.first_s, begin_s)
        return max(0.0, inside) / length if length > 0 else 0.0

    @property
    def user_tokens_per_s(self) -> float | None:
        """Completion tokens after the first over the time after the first; None for a single token."""
        if self.completion_tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.completion_tokens - 1) / (self.last_s - self.first_s)


def steady_window(samples: Sequence[StreamSample], concurrency: int) -> tuple[float, float]:
    """(begin, end) of the time in which all slots were busy.

    Raises:
        WindowError: there was none.
    """
    sent = sorted(samples, key=lambda sample: sample.sent_s)
    begin = max(sample.first_s for sample in sent[:concurrency])
    end = min(sample.last_s for sample in samples if sample.last_s > sent[-1].sent_s)
    if len(sent) < concurrency or end <= begin:
        raise WindowError(
            f"{len(sent)} requests never kept {concurrency} streams busy at once; raise --waves or --tokens"
        )
    return begin, end


def rates_of(samples: Sequence[StreamSample], concurrency: int, num_nodes: int) -> dict[str, Any]:
    """The row of a cell. With an error there are no rates: what is left would flatter.

    Raises:
        WindowError: all streams ended well, yet the slots were never busy at once.
    """
    errors = [sample.error for sample in samples if sample.error]
    row: dict[str, Any] = {
        "num_requests": len(samples),
        "num_errors": len(errors),
        "error": errors[0] if errors else None,
    }
    if errors:
        return row
    begin, end = steady_window(samples, concurrency)
    tokens = sum(sample.tokens_until(end) - sample.tokens_until(begin) for sample in samples)
    users = [
        rate
        for sample in samples
        if (rate := sample.user_tokens_per_s) and sample.share_within(begin, end) >= 0.5
    ]
    waits = sorted(sample.first_s - sample.sent_s for sample in samples)
    rounds = sum(sample.num_rounds for sample in samples)
    return {
        **row,
        "node_tokens_per_s": tokens / (end - begin) / num_nodes,
        "user_tokens_per_s": median(users) if users else None,
        "ttft_s": median(waits),
        "ttft_p95_s": waits[min(len(waits) - 1, int(0.95 * len(waits)))],
        "acceptance_length": _per(sum(s.num_accepted for s in samples), rounds, 1.0),
        "scheduled_per_round": _per(sum(s.num_scheduled for s in samples), rounds, 0.0),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "window_s": end - begin,
        "seconds": max(sample.last_s for sample in samples),
        "digests": [sample.digest for sample in sorted(samples, key=lambda s: s.index)],
    }


def _per(count: int, rounds: int, base: float) -> float | None:
    """`base` plus count a round; None where the server counts no rounds."""
    return base + count / rounds if rounds else None
