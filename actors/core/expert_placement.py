"""Which rank of a group holds which experts: every expert on one rank or more, and who serves which token's copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

DENSE_SLICES = 4  # parts a dense feed-forward is computed in, by however few ranks


def slices_of(width: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the parts of a dense feed-forward of intermediate `width` that `num_ranks` ranks share.

    Their outputs are rounded and added part by part, so the same parts give the same bits: there are as many for one
    rank as for four, and beyond that one a rank. A width too small for that is cut into single columns.
    """
    count = min(width, max(DENSE_SLICES, num_ranks))
    return tuple((i * width // count, (i + 1) * width // count) for i in range(count))


@dataclass(frozen=True)
class ExpertPlacement:
    """Ranks that hold each logical expert, ascending; the same on every rank and for every layer.

    A token's copy for expert e goes to its own rank if that holds e, else to the replica `(rank + token) % replicas`:
    a function of agreed facts alone, so that sender and receiver never differ.
    """

    num_ranks: int
    holders: tuple[tuple[int, ...], ...]  # [experts]

    def __post_init__(self) -> None:
        for expert, ranks in enumerate(self.holders):
            assert ranks, f"expert {expert} is on no rank"
            assert (
                sorted(set(ranks)) == list(ranks) and 0 <= ranks[0] <= ranks[-1] < self.num_ranks
            ), f"expert {expert} is on ranks {ranks} of {self.num_ranks}"

    @classmethod
    def even(cls, num_experts: int, num_ranks: int) -> ExpertPlacement:
        """Neighbouring experts together, as many on each rank as nearly possible; no replicas."""
        owner = np.arange(num_experts) * num_ranks // num_experts
        return cls(num_ranks, tuple((int(rank),) for rank in owner))

    @property
    def num_experts(self) -> int:
        return len(self.holders)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Experts of a rank, ascending: the order of its local indices."""
        return tuple(e for e, ranks in enumerate(self.holders) if rank in ranks)

    def local_index(self, rank: int) -> Int64:
        """[experts] place of each expert among those of the rank; -1 where it is not there."""
        found = np.full(self.num_experts, -1, np.int64)
        held = self.held_by(rank)
        found[list(held)] = np.arange(len(held))
        return found

    def server_table(self) -> Int64:
        """[ranks, experts, most replicas]: who serves a copy, by the token's rank and its number modulo replicas.

        Rows of fewer replicas repeat themselves as far as `cycle` says.
        """
        cycle = self.cycle
        table = np.empty((self.num_ranks, self.num_experts, cycle), np.int64)
        for expert, ranks in enumerate(self.holders):
            for rank in range(self.num_ranks):
                for token in range(cycle):
                    own = rank in ranks
                    table[rank, expert, token] = rank if own else ranks[(rank + token) % len(ranks)]
        return table

    @property
    def cycle(self) -> int:
        """Tokens after which the choice of replicas repeats, for every expert."""
        return int(np.lcm.reduce([len(ranks) for ranks in self.holders]))


def rank_loads(
    placement: ExpertPlacement, counts: Sequence[float] | npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """[ranks] copies each rank serves when the experts get `counts` [experts] and replicas share evenly."""
    loads = np.zeros(placement.num_ranks)
    for count, ranks in zip(np.asarray(counts, float).tolist(), placement.holders, strict=True):
        loads[list(ranks)] += count / len(ranks)
    return loads
