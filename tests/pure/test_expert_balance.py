"""Experts are placed by load: every one somewhere, hot ones twice, no rank overfull, the same plan everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.expert_balance import balanced, decode, encode, imbalance, rebalanced
from actors.core.expert_placement import ExpertPlacement, rank_loads


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(0, 2),
)
def test_every_expert_has_a_place_and_no_rank_more_than_it_can_hold(
    load: list[int], nodes: list[int], spare: int
) -> None:
    slots = -(-len(load) // len(nodes)) + spare
    placement = balanced(load, nodes, slots)
    assert placement.num_experts == len(load)
    assert max(len(placement.held_by(rank)) for rank in range(len(nodes))) <= slots
    assert rank_loads(placement, load).sum() == pytest.approx(sum(load))
    assert placement == balanced(np.array(load), nodes, slots)


def test_hot_experts_are_parted_and_copied() -> None:
    load = [90, 80, 5, 5]
    even = ExpertPlacement.even(4, 2)
    assert imbalance(even, load) == pytest.approx(170 / 90)
    placement = balanced(load, [0, 0], 2)
    assert imbalance(placement, load) < 1.06
    copied = balanced([100, 4, 4, 4], [0, 0], 3)
    assert copied.holders[0] == (0, 1) and imbalance(copied, [100, 4, 4, 4]) < 1.1
    assert imbalance(even, [0, 0, 0, 0]) == 1.0


def test_experts_are_spread_over_nodes_before_ranks() -> None:
    """Two hot experts go to different nodes, although the emptiest ranks at that moment are on either."""
    placement = balanced([50, 50, 1, 1], [0, 0, 1, 1], 1)
    nodes = {ranks[0] // 2 for ranks in placement.holders[:2]}
    assert nodes == {0, 1}


def test_copies_nobody_needs_are_not_made() -> None:
    assert balanced([0, 0], [0, 0], 2).holders == ((0,), (0,))
    assert balanced([5, 5], [0], 9).holders == ((0,), (0,))


def test_a_copy_for_which_only_its_own_rank_has_room_is_left_out() -> None:
    for load in ([9, 8, 7, 1], [50, 40, 1, 1], [3, 3, 3, 3], [100, 1, 1, 1]):
        placement = balanced(load, [0, 0, 1], 2)
        assert all(placement.holders)


def test_a_new_placement_of_experts_must_gain_something() -> None:
    even = [ExpertPlacement.even(4, 2)] * 2
    assert rebalanced(even, [[10, 10, 10, 10], [10, 10, 10, 11]], [0, 0], 2) is None
    found = rebalanced(even, [[50, 50, 1, 1], [10, 10, 10, 10]], [0, 0], 2)
    assert found is not None and imbalance(found[0], [50, 50, 1, 1]) == 1.0


def test_placements_of_experts_survive_the_way_through_a_collective() -> None:
    placements = [balanced([9, 1, 5], [0, 0], 2), ExpertPlacement.even(3, 2)]
    assert decode([float(n) for n in encode(placements)], 2, 3) == placements


def test_too_many_experts_for_the_ranks_are_refused() -> None:
    with pytest.raises(AssertionError, match="no room"):
        balanced([1, 1, 1], [0], 2)
