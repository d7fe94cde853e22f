"""Times of complete steps as they were measured: every repeat of every point, before anything is made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.own_profile import StepTimes

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepSamples:
    """G points, each measured the same number of times.

    Attributes:
        context_len: tokens every request of the point had in its cache.
        curve_context_len: the one of them that the cost curve is drawn at.
        shared_s: of times_s, what a lockstep group did together; None where it was not told apart.
    """

    batch_tokens: Int64  # [G]
    num_requests: Int64  # [G]
    context_len: Int64  # [G]
    times_s: Float64  # [G, repeats]
    curve_context_len: int
    shared_s: Float64 | None = None  # [G, repeats]

    def __post_init__(self) -> None:
        lengths = {
            len(a) for a in (self.batch_tokens, self.num_requests, self.context_len, self.times_s)
        }
        if len(lengths) != 1 or self.times_s.ndim != 2 or not self.times_s.size:
            raise ValueError(f"step samples of lengths {sorted(lengths)}: measure again")
        if self.shared_s is not None and self.shared_s.shape != self.times_s.shape:
            raise ValueError(f"shared_s of shape {self.shared_s.shape}: measure again")

    @property
    def median_s(self) -> Float64:
        """[G]"""
        medians: Float64 = np.median(self.times_s, axis=1)
        return medians

    @property
    def spread(self) -> float:
        """Half the middle range of the repeats over their median, as a median over points: how noisy it was."""
        low, high = np.quantile(self.times_s, (0.25, 0.75), axis=1)
        return float(np.median((high - low) / 2 / self.median_s))

    @property
    def has_contexts(self) -> bool:
        return len(np.unique(self.context_len)) > 1

    def curve(self) -> StepTimes:
        """The points at the curve's context, by batch tokens."""
        here = np.flatnonzero(self.context_len == self.curve_context_len)
        order = here[np.lexsort((self.num_requests[here], self.batch_tokens[here]))]
        shared = None if self.shared_s is None else np.median(self.shared_s, axis=1)[order]
        return StepTimes(
            self.batch_tokens[order], self.num_requests[order], self.median_s[order], shared
        )

    def context_cost_s(self) -> float:
        """Seconds that a context token adds to a step, by least squares over points measured at several contexts.

        Nothing where only one context was measured. Never negative.
        """
        tokens = (self.num_requests * self.context_len).astype(np.float64)
        _, point = np.unique(
            np.stack([self.batch_tokens, self.num_requests]), axis=1, return_inverse=True
        )
        point = point.ravel()
        size = np.bincount(point)
        # Every point has a base cost of its own: only what varies inside it with context counts.
        x = tokens - (np.bincount(point, tokens) / size)[point]
        y = self.median_s - (np.bincount(point, self.median_s) / size)[point]
        return max(0.0, float(x @ y / (x @ x))) if x.any() else 0.0
