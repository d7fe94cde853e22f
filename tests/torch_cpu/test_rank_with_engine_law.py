"""Unseeded streams through a rank keep the target's law, whatever decides the verify lengths (C1, C3)."""

from __future__ import annotations

from typing import Any

import pytest

from actors.core.local_policy import LocalPolicy
from actors.core.verify_decision import StepFacts, VerifyChoice
from tests.torch_cpu.table_streams import LIMIT, chi_squared, small_rank, staircase, streams_of


@pytest.mark.parametrize(
    ("name", "max_batch_tokens"),
    [("static_threshold", 60), ("algorithm1", 60), ("lagged", 60), ("static_length", 20)],
)
def test_streams_follow_the_law_of_the_target(name: Any, max_batch_tokens: int) -> None:
    policy = LocalPolicy(name, static_length=2, static_threshold=0.5)
    policy.times.measured(staircase())
    rank = small_rank(policy, max_batch_tokens)
    counts = streams_of(rank, seed=1)
    counters = rank.counters.acceptance
    assert 0 < counters.accepted.sum() < counters.scheduled.sum() < counters.proposed.sum()
    assert chi_squared(counts) < LIMIT


class LooksAhead:
    """Appendix A: sends both slots where the second one looks good, none otherwise; judged by x_1 itself."""

    def choose(self, facts: StepFacts) -> VerifyChoice:
        looks_good = facts.survivals[:, 1] > 0.3
        facts.caps[~looks_good] = 0
        return VerifyChoice(facts.survivals.size, 0.0, "looks_ahead")


def test_a_policy_that_looks_ahead_is_found_out() -> None:
    assert chi_squared(streams_of(small_rank(LooksAhead()), seed=1)) > 2 * LIMIT
