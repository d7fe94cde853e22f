"""The draft slots of a lockstep group, ranked by survival within each rank: exactly, or in bins when there are many.

Both forms answer the same questions about "the k best slots of each rank". Survivals come as one array, rank after
rank, so that a thousand ranks cost a few passes over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.prefix_scheduler import MIN_SURVIVAL

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

NUM_BINS = 256
_CHUNK = 32  # ranks counted at a time


@dataclass(frozen=True)
class ExactSlots:
    """Every slot by itself, in one order over the group: larger survival, then position, then arrival in the array."""

    survival: Float64  # [N] falling
    rank: Int64  # [N]
    place: Int64  # [N] how many better slots of the same rank there are
    num: Int64  # [n] slots of each rank

    @classmethod
    def of(cls, survivals: Float32, num_requests: Int64) -> ExactSlots:
        """survivals: [sum R, gamma]; num_requests: [n]."""
        gamma = survivals.shape[1]
        flat = np.flatnonzero(survivals >= MIN_SURVIVAL)
        order = np.lexsort((flat // gamma, flat % gamma, -survivals.flat[flat]))
        ranked = flat[order]
        rank = np.repeat(np.arange(len(num_requests)), num_requests)[ranked // gamma]
        place = np.empty(len(ranked), np.int64)
        num = np.bincount(rank, minlength=len(num_requests))
        for one in range(len(num_requests)):
            place[rank == one] = np.arange(num[one])
        return cls(survivals.flat[ranked].astype(np.float64), rank, place, num)

    def expected(self, drafts: Int64) -> Float64:
        """Expected accepted draft tokens of each rank when it verifies its `drafts` best slots: [n]."""
        taken = self.place < drafts[self.rank]
        return np.bincount(
            self.rank[taken], weights=self.survival[taken], minlength=len(self.num)
        ).astype(np.float64)

    def last_admitted(self, drafts: Int64) -> Float64:
        """Survival of the last of the best `drafts` slots of each rank; 1 where there are none: [n]."""
        last = np.ones(len(self.num))
        taken = self.place == drafts[self.rank] - 1
        last[self.rank[taken]] = self.survival[taken]
        return last


@dataclass(frozen=True)
class BinnedSlots:
    """Slots counted in `NUM_BINS` equal bins of survival, best bin first. A slot counts with its bin's centre."""

    cumulative: Int64  # [n, NUM_BINS] slots in this bin or a better one
    centres: Float64  # [NUM_BINS] falling

    @classmethod
    def of(cls, survivals: Float32, num_requests: Int64) -> BinnedSlots:
        """survivals: [sum R, gamma]; num_requests: [n]."""
        num_ranks, width = len(num_requests), NUM_BINS + 1
        ends = np.concatenate([[0], np.cumsum(num_requests)])
        cumulative = np.empty((num_ranks, NUM_BINS), np.int64)
        for start in range(0, num_ranks, _CHUNK):  # a chunk stays in the cache
            stop = min(start + _CHUNK, num_ranks)
            rows = survivals[ends[start] : ends[stop]]
            first = np.repeat(np.arange(stop - start) * width, num_requests[start:stop])
            cells = (_bins(rows) + first[:, None]).ravel()
            counts = np.bincount(cells, minlength=(stop - start) * width)
            counts = counts.reshape(-1, width)[:, :NUM_BINS]
            np.cumsum(counts, axis=1, out=cumulative[start:stop])
        centres = 1.0 - (np.arange(NUM_BINS) + 0.5) / NUM_BINS
        return cls(cumulative, centres)

    @property
    def num(self) -> Int64:
        """Slots of each rank: [n]."""
        return self.cumulative[:, -1]

    def expected(self, drafts: Int64) -> Float64:
        """Expected accepted draft tokens of each rank when it verifies its `drafts` best slots: [n]."""
        taken = np.minimum(self.cumulative, drafts[:, None])
        return np.diff(taken, axis=1, prepend=0) @ self.centres

    def last_admitted(self, drafts: Int64) -> Float64:
        """Lower edge of the bin of the last admitted slot of each rank; 1 where there are none: [n]."""
        bins = (self.cumulative < np.minimum(drafts, self.num)[:, None]).sum(axis=1)
        lower = 1.0 - (bins + 1.0) / NUM_BINS
        return np.where(drafts > 0, np.maximum(lower, MIN_SURVIVAL), 1.0)

    def merged(self, factor: int) -> BinnedSlots:
        """The same slots in bins that are `factor` times as wide."""
        return BinnedSlots(
            self.cumulative[:, factor - 1 :: factor],
            self.centres.reshape(-1, factor).mean(axis=1),
        )


def _bins(survivals: Float32) -> Int64:
    """Bin 0 holds survivals near one; bin `NUM_BINS` takes what is not worth verifying at all."""
    bins = (np.float32(NUM_BINS) - survivals * np.float32(NUM_BINS)).astype(np.int64)
    if float(survivals.min(initial=1.0)) < 1.0 / NUM_BINS:
        np.minimum(bins, NUM_BINS - 1, out=bins)
        bins[survivals < MIN_SURVIVAL] = NUM_BINS
    return bins


Slots = ExactSlots | BinnedSlots
