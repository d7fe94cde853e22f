"""What drafts were forecast to survive, against what came of them: per position, in bins for the calibration error.

Only slots that were verified enter. Which ones those are may depend on the forecast, never on the tokens behind it
(C3), so the comparison is fair. What a budget hides is not forgotten: a slot that was only verified because its round
was explored stands for all those that were not, by the inverse of its probability to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.calibration import DEFAULT_BINS as NUM_BINS

Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]


@dataclass
class Reliability:
    """Weighted sums over verified slots, by position and by bin of the forecast survival, each [gamma, NUM_BINS]."""

    num: Float64  # slots
    expected: Float64  # their forecast survivals
    accepted: Float64  # those that were accepted

    @classmethod
    def zero(cls, gamma: int) -> Reliability:
        shape = (gamma, NUM_BINS)
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of_rounds(
        cls,
        survivals: npt.NDArray[np.floating],
        verify_len: Ints,
        num_accepted: Ints,
        planned_len: Ints | None = None,
        explore_share: float = 1.0,
    ) -> Reliability:
        """Of N rounds.

        Args:
            survivals: [N, gamma] forecast when the rounds were decided, in 0..1.
            verify_len: [N] slots that were verified.
            num_accepted: [N] of those.
            planned_len: [N] slots the budget alone would have verified; None: all that were.
            explore_share: probability that a slot beyond that was verified all the same.
        """
        gamma = survivals.shape[1]
        rows, at = np.nonzero(np.arange(gamma) < verify_len[:, None])
        forecast = survivals[rows, at].astype(np.float64)
        weight = np.ones(len(rows))
        if planned_len is not None:
            weight[at >= planned_len[rows]] = 1 / explore_share
        flat = at * NUM_BINS + np.minimum((forecast * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        sums = (weight, weight * forecast, weight * (at < num_accepted[rows]))
        size, shape = gamma * NUM_BINS, (gamma, NUM_BINS)
        num, expected, accepted = (
            np.bincount(flat, each, size).astype(np.float64).reshape(shape) for each in sums
        )
        return cls(num, expected, accepted)

    def add(self, other: Reliability, keep: float = 1.0) -> None:
        """Take in newer rounds; of the older ones the share `keep` still counts."""
        self.num = keep * self.num + other.num
        self.expected = keep * self.expected + other.expected
        self.accepted = keep * self.accepted + other.accepted

    @property
    def ece(self) -> Float64:
        """[gamma] expected calibration error of the survival at each position: bin share times |mean forecast - share
        accepted|, summed over bins; NaN where nothing was verified."""
        total = self.num.sum(axis=1)
        gaps = np.abs(self.expected - self.accepted).sum(axis=1)
        error: Float64 = np.where(total > 0, gaps / np.maximum(total, 1e-300), np.nan)
        return error
