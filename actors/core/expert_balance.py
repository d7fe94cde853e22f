"""Where experts should lie for the load they get: hot ones more than once, spread over nodes first, then over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actors.core.expert_placement import ExpertPlacement, rank_loads

Int64 = npt.NDArray[np.int64]

MIN_GAIN = 0.05  # relative fall of the hottest rank's load that is worth moving weights for


def balanced(load: npt.ArrayLike, node_of_rank: Sequence[int], num_slots: int) -> ExpertPlacement:
    """A placement of experts with `load` [experts] (copies served, integers) on ranks with `num_slots` experts each.

    Every expert lies on one rank at least; free slots go to copies of those with the most load a copy. Then copies are
    dealt out, the heaviest first, each to the emptiest rank of the emptiest node that has room and lacks that expert.
    The same facts give the same placement everywhere: ties go to the lower number.
    """
    counts = np.asarray(load, np.int64)
    num_ranks, num_experts = len(node_of_rank), len(counts)
    assert num_experts <= num_slots * num_ranks, "there is no room for every expert"
    replicas = np.ones(num_experts, np.int64)
    for _ in range(num_slots * num_ranks - num_experts):
        share = np.where(replicas < num_ranks, counts / replicas, -1.0)
        if share.max() <= 0:
            break  # nobody needs another copy, or everybody has it
        replicas[int(share.argmax())] += 1
    room = np.full(num_ranks, num_slots)
    carried = np.zeros(num_ranks)
    holders: list[list[int]] = [[] for _ in range(num_experts)]
    for expert in sorted(range(num_experts), key=lambda e: (-counts[e] / replicas[e], e)):
        for _ in range(int(replicas[expert])):
            for rank in _emptiest(carried, room, node_of_rank, holders[expert]):
                holders[expert].append(rank)
                room[rank] -= 1
                carried[rank] += counts[expert] / replicas[expert]
    return ExpertPlacement(num_ranks, tuple(tuple(sorted(ranks)) for ranks in holders))


def _emptiest(
    carried: npt.NDArray[np.float64],
    room: npt.NDArray[np.int64],
    node_of_rank: Sequence[int],
    taken: Sequence[int],
) -> list[int]:
    """The rank that should get the next copy; none where every rank with room has the expert already."""
    free = [rank for rank in range(len(carried)) if room[rank] and rank not in taken]
    nodes = np.asarray(node_of_rank)
    of_node = {node: carried[nodes == node].mean() for node in set(node_of_rank)}
    return sorted(free, key=lambda rank: (of_node[node_of_rank[rank]], carried[rank], rank))[:1]


def imbalance(placement: ExpertPlacement, load: npt.ArrayLike) -> float:
    """Load of the hottest rank over the mean; 1 when even, or when there is none."""
    loads = rank_loads(placement, load)
    return float(loads.max() / loads.mean()) if loads.sum() else 1.0


def rebalanced(
    current: Sequence[ExpertPlacement],
    load: npt.ArrayLike,
    node_of_rank: Sequence[int],
    num_slots: int,
) -> list[ExpertPlacement] | None:
    """A new placement of every layer for load [layers, experts]; None when that would gain less than `MIN_GAIN`."""
    counts = np.asarray(load, np.int64)
    fresh = [balanced(of_layer, node_of_rank, num_slots) for of_layer in counts]

    def hottest(placements: Sequence[ExpertPlacement]) -> float:
        return float(sum(rank_loads(p, c).max() for p, c in zip(placements, counts, strict=True)))

    return fresh if hottest(fresh) < (1 - MIN_GAIN) * hottest(current) else None


def encode(placements: Sequence[ExpertPlacement]) -> list[int]:
    """Placements as numbers, for a collective: of every layer and expert, how many ranks it has, and which."""
    return [n for p in placements for ranks in p.holders for n in (len(ranks), *ranks)]


def decode(numbers: Sequence[float], num_ranks: int, num_experts: int) -> list[ExpertPlacement]:
    """What `encode` was given."""
    rest = [int(number) for number in numbers]
    holders: list[tuple[int, ...]] = []
    while rest:
        count = rest[0]
        holders.append(tuple(rest[1 : 1 + count]))
        rest = rest[1 + count :]
    starts = range(0, len(holders), num_experts)
    return [ExpertPlacement(num_ranks, tuple(holders[s : s + num_experts])) for s in starts]
