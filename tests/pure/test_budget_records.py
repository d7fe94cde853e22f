"""What the allocator keeps of the budgets it published, and what it says of a rank that does not draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.capacity import Allocator
from tests.pure.test_capacity import GAMMA, profile, report


def test_budgets_are_counted_by_rule_and_what_could_not_be_planned_is_a_fallback() -> None:
    allocator = Allocator(policy="joint")
    allocator.fold(profile(), 0.0)
    allocator.fold(profile("rank-1", slope=0.0), 0.0)
    for step in range(3):
        allocator.fold(report(step), 1.0 + step)
    allocator.fold(report(0, "rank-1"), 1.0)
    allocator.budgets(4.0)
    allocator.fold(report(3), 5.0)
    allocator.budgets(5.0)
    assert allocator.num_by_rule == {"lagged": 2, "flat_curve": 1}
    assert allocator.num_fallbacks == 1
    assert [record.number for record in allocator.records] == [0, 1, 2]
    last = allocator.records[-1]
    assert (last.budget.based_on_step, last.num_requests, last.at) == (3, 3, 5.0)
    loads = {load.rank: load for load in allocator.load_view(5.0).ranks}
    assert loads["rank-0"].budget == last.budget


def test_a_step_without_any_block_plans_nothing_and_takes_no_budget_back() -> None:
    """Drafting is paused: "verify nothing" would still be in force when the first blocks come."""
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.fold(report(4), 0.0)
    (budget,) = allocator.budgets(0.0)
    allocator.fold(report(5, survivals=np.zeros((3, GAMMA), np.float32)), 0.0)
    assert allocator.budgets(0.0) == []
    assert allocator.load_view(0.0).ranks[0].budget == budget


def test_one_more_request_of_a_rank_that_does_not_draft_costs_no_drafting() -> None:
    tpot = {}
    for blocks in (0, 3):
        allocator = Allocator()
        allocator.fold(replace(profile(), draft_time_s=np.full(6, 0.7)), 0.0)
        shown = np.full(GAMMA, blocks, np.int64)
        allocator.fold(report(4, num_prefill_tokens=1, num_proposed=shown), 0.0)
        tpot[blocks] = allocator.load_view(0.0).ranks[0].predicted_tpot_s
    assert tpot[3] == pytest.approx(tpot[0] + 0.7)
