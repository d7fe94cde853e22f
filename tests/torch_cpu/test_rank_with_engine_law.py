"""Unseeded streams through a rank keep the target's law, whatever decides the verify lengths (C1, C3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.core import rank as rank_module
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import StepFacts
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.table_streams import (
    LIMIT,
    TableDrafter,
    chi_squared,
    small_rank,
    staircase,
    streams_of,
)


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


class OneBlockDrafter(TableDrafter):
    """Proposes one block a stream, right after its first token, and never another."""

    def advance(self, commit: CommitBatch) -> ProposalBatch | None:
        first = commit.committed_lens == 2
        return super().advance(replace(commit, wants_block=commit.wants_block & first))


def test_a_block_that_was_judged_once_is_never_judged_again() -> None:
    """Its tokens are no fresh draws any more: that x_1 was refused says which token it is."""
    line = "table.wants_draft[rounds] = table.has_draft[rounds] = table.is_unasked[rounds] = False"
    reusing = mutant(rank_module, line, line.replace(" = table.has_draft[rounds]", ""))
    for module, is_found_out in ((rank_module, False), (reusing, True)):
        plain = small_rank(LocalPolicy("static_length", static_length=2))
        rank = module.Rank(plain.endpoint, plain.limits, plain.decider)
        # Four tokens: the first comes from the prompt, and a block can be refused and offered again before the last.
        counts = streams_of(rank, seed=3, drafter=OneBlockDrafter(3), num_new=4)
        chi2 = chi_squared(counts)
        assert chi2 > 3 * LIMIT if is_found_out else chi2 < 2 * LIMIT  # 80 degrees of freedom
