"""Confidences of drafters without a confidence head: which blocks are out, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.acceptance_estimate import AcceptanceEstimate, Bins
from actors.core.messages import CommitBatch

NUM_PEAK_BINS = 10


@dataclass(frozen=True)
class _Proposed:
    generation: int
    committed_len: int
    bins: Bins  # [gamma]


class OnlineConfidence:
    """An `AcceptanceEstimate` fed by the commits that follow a drafter's own proposals.

    Cold it says 0.5 for every slot, which lets short prefixes be tried. It knows one number a slot, so it is a
    floor for what an estimator can do, and lawful: bins may depend on q_k and on older tokens only (C3).
    """

    def __init__(self, gamma: int, num_bins: int = NUM_PEAK_BINS) -> None:
        self.estimate = AcceptanceEstimate(gamma, num_bins)
        self._out: dict[str, _Proposed] = {}

    def learn(self, batch: CommitBatch, fresh: npt.NDArray[np.int64]) -> None:
        """Take in what the `fresh` entries (indices) say of blocks proposed before; call it before `propose`."""
        bins, verified, accepted = [], [], []
        for i in fresh.tolist():
            proposed = self._out.pop(batch.request_ids[i], None)
            if proposed is None or proposed.generation != batch.generations[i]:
                continue
            if batch.first_positions[i] != proposed.committed_len - 1:
                continue  # not the round this block was for
            bins.append(proposed.bins)
            verified.append(int(batch.verify_lens[i]))
            accepted.append(int(batch.committed_lens[i]) - proposed.committed_len - 1)
        if bins:
            self.estimate.observe(np.stack(bins), np.array(verified), np.array(accepted))

    def propose(
        self, batch: CommitBatch, wanted: npt.NDArray[np.int64], bins: Bins
    ) -> npt.NDArray[np.float32]:
        """Return confidences [n, gamma] of blocks for the `wanted` entries, whose slots fall into bins [n, gamma]."""
        for row, i in enumerate(wanted.tolist()):
            self._out[batch.request_ids[i]] = _Proposed(
                int(batch.generations[i]), int(batch.committed_lens[i]), bins[row]
            )
        return self.estimate.confidences(bins)

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Forget the blocks of these requests; unknown ids are fine."""
        for request_id in request_ids:
            self._out.pop(request_id, None)


def peak_bins(peaks: npt.NDArray[np.floating], num_bins: int = NUM_PEAK_BINS) -> Bins:
    """Return the bin of each slot from the largest probability of its distribution at temperature 1."""
    bins: Bins = np.minimum((peaks * num_bins).astype(np.int64), num_bins - 1)
    return bins
