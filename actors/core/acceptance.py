"""Acceptance counters: proposed >= scheduled >= accepted, kept apart per position of the block.

trimmed = proposed - scheduled was never sent to the target; rejected = scheduled - accepted was sent and refused.
Trimming is never counted as rejection.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass
class AcceptanceCounters:
    """Sums over rounds. A round is one target step of a request that yields a token, with or without a proposal."""

    proposed: Int64  # [gamma]
    scheduled: Int64  # [gamma]
    accepted: Int64  # [gamma]
    expected: Float64  # [gamma] forecast survivals of the scheduled ones
    num_rounds: int = 0
    num_committed: int = 0

    @classmethod
    def zero(cls, gamma: int) -> AcceptanceCounters:
        none = np.zeros(gamma, np.int64)
        return cls(none, none.copy(), none.copy(), np.zeros(gamma))

    @classmethod
    def of_step(
        cls,
        survivals: npt.NDArray[np.floating],
        proposal_len: npt.NDArray[np.integer],
        verify_len: npt.NDArray[np.integer],
        num_accepted: npt.NDArray[np.integer],
        num_committed: int | None = None,
    ) -> AcceptanceCounters:
        """Counters of one step from the three lengths of each round, [R] each.

        Args:
            survivals: [R, gamma] as forecast when the lengths were decided.
            num_committed: tokens that really joined their streams; fewer than accepted + 1 a round when a stop
                condition cut one. None means nothing was cut.
        """
        assert (num_accepted <= verify_len).all() and (verify_len <= proposal_len).all(), (
            f"want accepted <= scheduled <= proposed, got {num_accepted} {verify_len} {proposal_len}"
        )
        gamma = survivals.shape[1]
        committed = (
            int(num_accepted.sum()) + len(num_accepted) if num_committed is None else num_committed
        )
        return cls(
            _reaching(proposal_len, gamma),
            _reaching(verify_len, gamma),
            _reaching(num_accepted, gamma),
            survivals.sum(axis=0, where=np.arange(gamma) < verify_len[:, None], dtype=np.float64),
            len(num_accepted),
            committed,
        )

    def add(self, other: AcceptanceCounters) -> None:
        self.proposed = self.proposed + other.proposed
        self.scheduled = self.scheduled + other.scheduled
        self.accepted = self.accepted + other.accepted
        self.expected = self.expected + other.expected
        self.num_rounds += other.num_rounds
        self.num_committed += other.num_committed

    @property
    def trimmed(self) -> Int64:
        return self.proposed - self.scheduled

    @property
    def rejected(self) -> Int64:
        return self.scheduled - self.accepted

    @property
    def acceptance_length(self) -> float:
        """Committed tokens a round, the target's own token included; NaN before the first round."""
        return self.num_committed / self.num_rounds if self.num_rounds else float("nan")


def _reaching(lengths: npt.NDArray[np.integer], gamma: int) -> Int64:
    """How many of `lengths` reach position k, for k = 1..gamma."""
    reached: Int64 = (lengths[:, None] > np.arange(gamma)).sum(axis=0, dtype=np.int64)
    return reached
