"""What drafts were forecast to survive, against what came of them: per position, and in bins for the calibration error.

Only slots that were verified enter. Which ones those are may depend on the forecast, never on the tokens behind it
(C3), so the comparison is fair; slots that were trimmed say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

NUM_BINS = 10


@dataclass
class Reliability:
    """Sums over verified slots, by position and by bin of the forecast survival."""

    num: Int64  # [gamma, NUM_BINS] slots
    expected: Float64  # [gamma, NUM_BINS] sum of their forecast survivals
    accepted: Int64  # [gamma, NUM_BINS] those that were accepted

    @classmethod
    def zero(cls, gamma: int) -> Reliability:
        shape = (gamma, NUM_BINS)
        return cls(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, np.int64))

    @classmethod
    def of_step(
        cls,
        survivals: npt.NDArray[np.floating],
        verify_len: npt.NDArray[np.integer],
        num_accepted: npt.NDArray[np.integer],
    ) -> Reliability:
        """Of one step with R rounds.

        Args:
            survivals: [R, gamma] forecast when the step was decided, in 0..1.
            verify_len: [R] slots that were verified.
            num_accepted: [R] of those.
        """
        gamma = survivals.shape[1]
        position = np.arange(gamma)
        rows, at = np.nonzero(position < verify_len[:, None])
        forecast = survivals[rows, at].astype(np.float64)
        flat = at * NUM_BINS + np.minimum((forecast * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        happened = at < num_accepted[rows]
        size, shape = gamma * NUM_BINS, (gamma, NUM_BINS)
        return cls(
            np.bincount(flat, minlength=size).reshape(shape),
            np.bincount(flat, forecast, size).astype(np.float64).reshape(shape),
            np.bincount(flat[happened], minlength=size).reshape(shape),
        )

    def add(self, other: Reliability) -> None:
        self.num = self.num + other.num
        self.expected = self.expected + other.expected
        self.accepted = self.accepted + other.accepted

    @property
    def expected_by_position(self) -> Float64:
        """[gamma] how many verified slots should have been accepted."""
        by_position: Float64 = self.expected.sum(axis=1)
        return by_position

    @property
    def ece(self) -> float | None:
        """Expected calibration error of the survivals: bin share times |mean forecast - share accepted|, summed."""
        total = int(self.num.sum())
        if not total:
            return None
        gap = np.abs(self.expected.sum(axis=0) - self.accepted.sum(axis=0))
        return float(gap.sum()) / total
