"""The allocator's brain: budgets from reports and curves, restarts, stale messages, the load view."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.budget_solver import EachAlone, RankView
from actors.core.capacity import Allocator
from actors.core.messages import Endpoint, RankProfile, StepReport
from actors.core.prefix_scheduler import Budget, search
from actors.core.sps import CostCurve, CurveError, CurveIdentityError

GAMMA = 4


def endpoint(name: str = "rank-0", epoch: str = "a") -> Endpoint:
    return Endpoint(name, "target", "", "", epoch)


def profile(
    name: str = "rank-0", epoch: str = "a", slope: float = 0.1, identity: str = "here"
) -> RankProfile:
    tokens = np.array([1, 8, 9, 16, 17, 64], np.int32)
    times = 1.0 + slope * np.array([0.0, 0.0, 4.0, 4.0, 8.0, 64.0])
    return RankProfile(
        endpoint(name, epoch), identity, tokens, tokens, times, np.full(6, 0.05), GAMMA
    )


def report(
    step: int, name: str = "rank-0", epoch: str = "a", confidence: float = 0.9, **changes: object
) -> StepReport:
    rows = 3
    survival = np.cumprod(np.full((rows, GAMMA), confidence, np.float32), axis=1)
    zeros = np.zeros(GAMMA, np.int64)
    base = StepReport(
        rank=endpoint(name, epoch),
        step=step,
        step_time_s=1.0,
        draft_wait_s=0.05,
        num_requests=rows,
        num_prefill_tokens=0,
        batch_tokens=8,
        context_tokens=100,
        survivals=survival,
        num_proposed=zeros,
        num_scheduled=zeros,
        num_accepted=zeros,
        num_committed=6,
        num_free_blocks=10,
        num_blocks=20,
        num_waiting=0,
        budget_rule="cold",
        budget_used=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_report_becomes_a_budget_for_two_steps_later_by_the_search_on_its_survivals() -> None:
    allocator = Allocator(budget_ttl_steps=5)
    allocator.fold(profile(), 0.0)
    allocator.fold(report(7), 0.0)
    (budget,) = allocator.budgets(0.0)
    expected = search(report(7).survivals, CostCurve.of(profile()))
    assert (budget.rank, budget.epoch) == ("rank-0", "a")
    assert (budget.based_on_step, budget.for_step, budget.expires_step) == (7, 9, 14)
    assert budget.max_draft_tokens == expected.max_draft_tokens > 0
    assert budget.min_survival == expected.min_survival


def test_a_report_is_budgeted_once_and_the_newest_wins() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.fold(report(7), 0.0)
    allocator.fold(report(8), 0.0)
    assert [b.based_on_step for b in allocator.budgets(0.0)] == [8]
    assert allocator.budgets(0.0) == []


def test_repeated_and_late_reports_are_dropped_and_counted() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    assert allocator.fold(report(7), 0.0)
    assert not allocator.fold(report(7), 0.0)
    assert not allocator.fold(report(3), 0.0)
    assert allocator.num_stale_reports == 2


def test_a_restarted_rank_starts_afresh_and_its_old_incarnation_is_over() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.fold(report(50), 0.0)
    assert allocator.fold(report(0, epoch="b"), 1.0)
    assert allocator.budgets(1.0) == [], "the curve belonged to the old incarnation"
    assert not allocator.fold(report(51), 1.0)
    assert not allocator.fold(profile(), 1.0)
    allocator.fold(profile(epoch="b"), 1.0)
    (budget,) = allocator.budgets(1.0)
    assert (budget.epoch, budget.based_on_step) == ("b", 0)


def test_every_rank_is_budgeted_from_its_own_survivals_and_curve() -> None:
    allocator = Allocator()
    for name, slope, confidence in (
        ("rank-0", 0.001, 0.95),
        ("rank-1", 5.0, 0.95),
        ("rank-2", 0.1, 0.02),
    ):
        allocator.fold(profile(name, slope=slope), 0.0)
        allocator.fold(report(4, name, confidence=confidence), 0.0)
    budgets = {b.rank: b.max_draft_tokens for b in allocator.budgets(0.0)}
    assert budgets["rank-0"] == 3 * GAMMA or budgets["rank-0"] > budgets["rank-1"]
    assert budgets["rank-2"] <= 5
    alone = Allocator()
    alone.fold(profile("rank-1", slope=5.0), 0.0)
    alone.fold(report(4, "rank-1", confidence=0.95), 0.0)
    assert alone.budgets(0.0)[0].max_draft_tokens == budgets["rank-1"]


def test_ranks_without_a_curve_a_report_or_a_request_get_no_budget() -> None:
    allocator = Allocator()
    allocator.fold(report(4, "no-curve"), 0.0)
    allocator.fold(profile("no-report"), 0.0)
    allocator.fold(profile("idle"), 0.0)
    allocator.fold(
        report(4, "idle", survivals=np.zeros((0, GAMMA), np.float32), num_requests=0), 0.0
    )
    assert allocator.budgets(0.0) == []


def test_a_silent_rank_gets_no_budget() -> None:
    allocator = Allocator(max_report_age_s=10.0)
    allocator.fold(profile(), 0.0)
    allocator.fold(report(4), 0.0)
    assert allocator.budgets(10.5) == []
    assert len(allocator.budgets(9.5)) == 1


def test_only_the_lagged_policy_is_decided_centrally() -> None:
    allocator = Allocator(policy="static_length")
    allocator.fold(profile(), 0.0)
    allocator.fold(report(4), 0.0)
    assert allocator.budgets(0.0) == []


def test_a_curve_of_another_identity_is_refused_and_the_earlier_one_stays() -> None:
    allocator = Allocator(expected_identity="here")
    allocator.fold(profile(), 0.0)
    with pytest.raises(CurveIdentityError):
        allocator.fold(profile(identity="there"), 1.0)
    allocator.fold(report(4), 1.0)
    assert len(allocator.budgets(1.0)) == 1


def test_a_curve_without_points_is_refused() -> None:
    empty = np.zeros(0, np.int32)
    bad = replace(
        profile(),
        batch_tokens=empty,
        num_requests=empty,
        step_time_s=0.0 * empty,
        draft_time_s=0.0 * empty,
    )
    with pytest.raises(CurveError, match="no points"):
        Allocator().fold(bad, 0.0)


def test_served_steps_correct_the_budget_of_a_curve_that_was_too_hopeful() -> None:
    """Beyond 8 tokens the served steps cost far more than measured: the budget shrinks to the first tread."""
    allocator = Allocator()
    allocator.fold(profile(slope=0.001), 0.0)
    allocator.fold(report(0), 0.0)
    (hopeful,) = allocator.budgets(0.0)
    for step in range(1, 400):
        tokens, served_s = ((7, 1.0), (15, 2.9))[step % 2]
        allocator.fold(report(step, batch_tokens=tokens, step_time_s=served_s), 0.0)
    (corrected,) = allocator.budgets(0.0)
    assert hopeful.max_draft_tokens == 12
    assert corrected.max_draft_tokens < 8


def test_when_prediction_and_measurement_part_the_budget_says_so() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    for step in range(400):
        tokens, served_s = ((7, 1.0), (60, 80.0))[step % 2]
        allocator.fold(report(step, batch_tokens=tokens, step_time_s=served_s), 0.0)
    (budget,) = allocator.budgets(0.0)
    assert (budget.rule, budget.min_survival) == ("curve_mistrusted", 0.5)


def test_another_solver_takes_the_place_of_the_independent_one() -> None:
    seen: list[RankView] = []

    class Fixed(EachAlone):
        def __call__(self, views: list[RankView], min_predicted_gain: float) -> list[Budget]:
            seen.extend(views)
            return [Budget(1, 0.5, "joint")] * len(views)

    allocator = Allocator(solver=Fixed())
    for name in ("rank-0", "rank-1"):
        allocator.fold(profile(name), 0.0)
        allocator.fold(report(4, name), 0.0)
    assert {b.rule for b in allocator.budgets(0.0)} == {"joint"}
    assert len(seen) == len(EachAlone()(seen, 0.0)) == 2


# --- load view -------------------------------------------------------------------------------------------------------


def test_the_load_view_tells_what_was_reported_and_how_old_it_is() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 1.0)
    allocator.fold(report(4, num_waiting=2), 3.0)
    view = allocator.load_view(5.0)
    (load,) = view.ranks
    assert (load.rank, load.num_running, load.num_waiting) == ("rank-0", 3, 2)
    assert (load.num_free_blocks, load.num_blocks, load.age_s) == (10, 20, 2.0)
    assert allocator.load_view(6.0).version == view.version + 1


def test_a_busier_or_slower_rank_predicts_a_longer_time_per_token() -> None:
    allocator = Allocator()
    for name, slope in (("fast", 0.1), ("slow", 1.0), ("queued", 0.1), ("busy", 0.1)):
        allocator.fold(profile(name, slope=slope), 0.0)
    for name, changes in (
        ("fast", {}),
        ("slow", {}),
        ("queued", {"num_waiting": 9}),
        ("busy", {"num_requests": 12, "batch_tokens": 40, "num_committed": 24}),
    ):
        allocator.fold(report(4, name, **changes), 0.0)  # type: ignore[arg-type]
    tpot = {load.rank: load.predicted_tpot_s for load in allocator.load_view(0.0).ranks}
    assert tpot["fast"] < min(tpot["slow"], tpot["queued"], tpot["busy"])


def test_tokens_committed_per_round_shorten_the_predicted_time_per_token() -> None:
    good, poor = Allocator(), Allocator()
    for step in range(100):
        good.fold(report(step, num_committed=9), 0.0)
        poor.fold(report(step, num_committed=3), 0.0)
    ratio = (
        poor.load_view(0.0).ranks[0].predicted_tpot_s
        / good.load_view(0.0).ranks[0].predicted_tpot_s
    )
    assert ratio == pytest.approx(3.0, rel=0.01)


def test_prefill_of_one_step_does_not_count_as_the_width_of_every_round() -> None:
    allocator = Allocator()
    for name, changes in (
        ("plain", {}),
        ("prefilling", {"batch_tokens": 58, "num_prefill_tokens": 50}),
    ):
        allocator.fold(profile(name), 0.0)
        allocator.fold(report(4, name, **changes), 0.0)
    plain, prefilling = allocator.load_view(0.0).ranks
    assert prefilling.predicted_tpot_s == pytest.approx(plain.predicted_tpot_s, rel=0.15)


def test_a_rank_that_has_only_been_profiled_is_in_the_view_with_unknown_blocks() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    (load,) = allocator.load_view(0.0).ranks
    assert (load.num_running, load.num_blocks) == (0, 0) and load.predicted_tpot_s > 0


def test_a_forgotten_rank_leaves_the_view_and_its_messages_are_dropped() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.forget("rank-0")
    allocator.forget("rank-0")
    assert allocator.load_view(0.0).ranks == ()
    assert not allocator.fold(report(9), 0.0)


def test_a_rank_that_was_only_silent_is_taken_back_with_its_curve() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.fold(report(7), 0.0)
    allocator.forget("rank-0")
    assert not allocator.recall("rank-0", "b"), "another incarnation starts afresh"
    assert allocator.recall("rank-0", "a") and not allocator.recall("rank-0", "a")
    assert allocator.fold(report(9), 1.0)
    assert [budget.based_on_step for budget in allocator.budgets(1.0)] == [9]


def test_an_incarnation_that_was_followed_by_another_does_not_come_back() -> None:
    allocator = Allocator()
    allocator.fold(profile(), 0.0)
    allocator.fold(profile(epoch="b"), 0.0)
    allocator.forget("rank-0")
    assert not allocator.recall("rank-0", "a")
    assert not allocator.fold(report(9, epoch="a"), 0.0)
