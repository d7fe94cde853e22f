"""Experts are on some rank, and sender and receiver agree which one serves a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.expert_placement import DENSE_SLICES, ExpertPlacement, rank_loads, slices_of

PLACEMENTS = st.integers(1, 5).flatmap(
    lambda ranks: st.lists(
        st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda held: tuple(sorted(held))),
        min_size=1,
        max_size=9,
    ).map(lambda holders: ExpertPlacement(ranks, tuple(holders)))
)


@pytest.mark.parametrize(
    ("experts", "ranks", "held"),
    [(8, 2, [4, 4]), (5, 2, [3, 2]), (6, 4, [2, 1, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_experts_are_spread_evenly(experts: int, ranks: int, held: list[int]) -> None:
    placement = ExpertPlacement.even(experts, ranks)
    assert [len(placement.held_by(rank)) for rank in range(ranks)] == held
    assert sorted(e for rank in range(ranks) for e in placement.held_by(rank)) == list(
        range(experts)
    )


@given(PLACEMENTS)
def test_a_copy_is_served_by_a_rank_that_holds_its_expert_at_home_where_it_can(
    placement: ExpertPlacement,
) -> None:
    table = placement.server_table()
    assert table.shape == (placement.num_ranks, placement.num_experts, placement.cycle)
    for rank in range(placement.num_ranks):
        local = placement.local_index(rank)
        held = placement.held_by(rank)
        assert [held[i] for i in local[local >= 0]] == list(held)
        for expert, ranks in enumerate(placement.holders):
            servers = table[rank, expert]
            assert set(servers) <= set(ranks)
            if rank in ranks:
                assert (servers == rank).all()
            else:  # every replica gets its share
                assert len(set(np.bincount(servers)[list(ranks)])) == 1


def test_loads_of_experts_are_shared_by_replicas() -> None:
    placement = ExpertPlacement(2, ((0, 1), (0,), (1,)))
    assert rank_loads(placement, [10, 4, 1]).tolist() == [9.0, 6.0]


@pytest.mark.parametrize("holders", [((0,), ()), ((1, 0),), ((0, 2),), ((0, 0),)])
def test_an_expert_on_no_rank_or_on_a_strange_one_is_refused(
    holders: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(AssertionError, match="expert"):
        ExpertPlacement(2, holders)


@given(width=st.integers(1, 400), ranks=st.integers(1, 12))
def test_slices_cover_a_dense_layer_and_are_the_same_for_any_few_ranks(
    width: int, ranks: int
) -> None:
    found = slices_of(width, ranks)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == width
    sizes = {stop - start for start, stop in found}
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
    assert len(found) == min(width, max(DENSE_SLICES, ranks))
    if ranks <= DENSE_SLICES:
        assert found == slices_of(width, 1)
