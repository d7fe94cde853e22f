"""Conditional acceptance learned from served rounds, for drafters that have no confidence head.

A slot of a block falls into a bin by what the drafter knew before it drew the slot's token (how peaked its distribution
was, how long a match it found). Of every bin the estimate is the share of tokens accepted among those that were
scheduled and reached; slots a budget cut off, or that lie behind a refusal, say nothing and are left out. So it depends
on rounds that are over and on q_k, never on the token x_k it judges (C3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Bins = npt.NDArray[np.int64]

PRIOR = 0.5  # what is assumed of a position nothing is known of
PRIOR_WEIGHT = 4.0  # observations this assumption counts for
POSITION_WEIGHT = (
    8.0  # observations that the rate of the whole position counts for in each of its bins
)
MEMORY_ROUNDS = 2000.0  # after so many rounds of silence a share 1 / e of what was learned is left


class AcceptanceEstimate:
    """Estimates for `gamma` positions with `num_bins` bins each.

    What was learned fades with every round, also where nothing was scheduled: a position that was given up because it
    looked bad returns to the prior in time, and is tried again.
    """

    def __init__(self, gamma: int, num_bins: int) -> None:
        self.num_bins = num_bins
        self._accepted: Float64 = np.zeros((gamma, num_bins))
        self._reached: Float64 = np.zeros((gamma, num_bins))
        self._positions = np.arange(gamma)

    @property
    def num_reached(self) -> Float64:
        """[gamma] scheduled and reached tokens remembered at each position."""
        total: Float64 = self._reached.sum(axis=1)
        return total

    def observe(
        self,
        bins: Bins,
        verify_len: npt.NDArray[np.integer],
        num_accepted: npt.NDArray[np.integer],
    ) -> None:
        """Learn from N rounds: bins [N, gamma] of their blocks, how much was scheduled [N] and accepted [N]."""
        keep = np.exp(-len(bins) / MEMORY_ROUNDS)
        self._accepted *= keep
        self._reached *= keep
        positions = np.broadcast_to(self._positions, bins.shape)
        reached = positions < np.minimum(num_accepted + 1, verify_len)[:, None]
        accepted = reached & (positions < num_accepted[:, None])
        np.add.at(self._reached, (positions[reached], bins[reached]), 1.0)
        np.add.at(self._accepted, (positions[accepted], bins[accepted]), 1.0)

    def confidences(self, bins: Bins) -> npt.NDArray[np.float32]:
        """Conditional acceptance [N, gamma] of slots that fall into bins [N, gamma]."""
        accepted, reached = self._accepted.sum(axis=1), self._reached.sum(axis=1)
        rate = (accepted + PRIOR * PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT)
        table = (self._accepted + POSITION_WEIGHT * rate[:, None]) / (
            self._reached + POSITION_WEIGHT
        )
        found: npt.NDArray[np.float32] = table[self._positions, bins].astype(np.float32)
        return found
