"""The joint solver in the allocator: budgets of a group from reports and curves, learning, and its fallbacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.budget_solver import RankView
from actors.core.capacity import Allocator
from actors.core.classes import ClassPrices
from actors.core.lockstep_solver import MISTRUSTED, JointSolver
from actors.core.messages import Endpoint, RankProfile, StepReport
from actors.core.prefix_scheduler import COLD_PRICE, lagged_budget
from actors.core.service_class import ServiceClass
from actors.core.sps import RankTimes
from tests.pure.lockstep import staircase

GAMMA = 4
CURVE = staircase(256, 16, 1.0, 0.4)
RANKS = ["rank-0", "rank-1"]


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, "target", "", "", "a")


def profile(name: str) -> RankProfile:
    tokens = CURVE.batch_tokens.astype(np.int32)
    zeros = np.zeros(len(tokens))
    return RankProfile(endpoint(name), "here", tokens, tokens, CURVE.step_time_s, zeros, GAMMA)


def report(
    step: int, name: str, rows: int, confidence: float = 0.8, **changes: object
) -> StepReport:
    survivals = np.cumprod(np.full((rows, GAMMA), confidence, np.float32), axis=1)
    zeros = np.zeros(GAMMA, np.int64)
    base = StepReport(
        endpoint(name), step, 2.0, 0.0, rows, 0, 2 * rows, 10, survivals,
        zeros, zeros, zeros, rows, 9, 9, 0, "joint", rows,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def allocator(solver: JointSolver) -> Allocator:
    brain = Allocator(solver=solver)
    for name in RANKS:
        brain.fold(profile(name), 0.0)
    return brain


def survivals(rows: int, confidence: float = 0.8) -> npt.NDArray[np.float32]:
    return np.cumprod(np.full((rows, GAMMA), confidence, np.float32), axis=1)


def view(name: str, rows: int, times: RankTimes) -> RankView:
    return RankView(name, survivals(rows), 0, times)


def measured() -> RankTimes:
    times = RankTimes()
    times.measured(CURVE)
    return times


def test_the_allocator_publishes_the_joint_plan_of_a_group() -> None:
    solver = JointSolver([RANKS])
    brain = allocator(solver)
    brain.fold(report(7, "rank-0", 40), 0.0)
    brain.fold(report(7, "rank-1", 4), 0.0)
    budgets = {budget.rank: budget for budget in brain.budgets(0.0)}
    model = solver.model_of("rank-0")
    assert model is not None
    plan = solver.plan_of("rank-1")
    assert plan is not None and plan.rule == "joint"
    assert [budgets[name].max_draft_tokens for name in RANKS] == list(plan.max_draft_tokens)
    assert budgets["rank-1"].max_draft_tokens == 16
    assert budgets["rank-0"].for_step == 9
    assert {budget.rule for budget in budgets.values()} == {"joint"}


def test_a_rank_that_has_not_reported_again_counts_with_its_last_survivals() -> None:
    solver = JointSolver([RANKS])
    brain = allocator(solver)
    brain.fold(report(7, "rank-0", 40), 0.0)
    brain.fold(report(7, "rank-1", 4), 0.0)
    both = {b.rank: b.max_draft_tokens for b in brain.budgets(0.0)}
    brain.fold(report(8, "rank-1", 4), 0.0)
    (later,) = brain.budgets(0.0)
    assert (later.rank, later.max_draft_tokens) == ("rank-1", both["rank-1"])


def test_an_idle_rank_costs_a_step_and_gets_nothing() -> None:
    solver = JointSolver([RANKS])
    idle = report(7, "rank-1", 0)
    solver.observe(idle)
    (budget,) = solver([view("rank-0", 40, measured())], 0.0)
    plan = solver.plan_of("rank-0")
    assert plan is not None and plan.max_draft_tokens[1] == 0
    assert budget.max_draft_tokens == plan.max_draft_tokens[0] > 0
    solver([view("rank-1", 8, measured())], 0.0)
    solver.observe(replace(idle, step=9))
    solver([view("rank-0", 40, measured())], 0.0)
    emptied = solver.plan_of("rank-0")
    assert emptied is not None and emptied.max_draft_tokens[1] == 0


def test_a_rank_outside_every_group_is_planned_by_itself() -> None:
    solver = JointSolver([RANKS])
    alone = view("other", 8, measured())
    assert solver([alone], 0.0) == [lagged_budget(alone.survivals, alone.times)]
    assert solver.model_of("other") is None and solver.plan_of("other") is None
    assert solver.observe(report(3, "other", 8)), "its time is its own"
    assert solver.prediction_error("other") is None
    solver.forget("other")
    assert solver([alone], 0.0) == [lagged_budget(alone.survivals, alone.times)]


def test_a_group_without_a_usable_curve_is_left_to_its_ranks() -> None:
    solver = JointSolver([RANKS])
    (budget,) = solver([view("rank-0", 8, RankTimes())], 0.0)
    assert (budget.rule, budget.min_survival) == ("cold", COLD_PRICE)
    times = RankTimes()
    times.measured(replace(CURVE, is_flat=True))
    (budget,) = solver([view("rank-0", 8, times)], 0.0)
    assert budget.rule == "flat_curve"
    assert solver.plan_of("rank-0") is None


def test_the_group_s_model_learns_once_a_step_from_complete_plain_steps() -> None:
    solver = JointSolver([RANKS])
    model = solver.model_of("rank-0")
    assert model is not None
    solver.observe(report(6, "rank-0", 8))
    solver.observe(report(6, "rank-1", 8))
    assert model.num_steps == 0  # no curve yet
    solver([view(name, 8, measured()) for name in RANKS], 0.0)
    solver.observe(report(7, "rank-0", 8))
    assert model.num_steps == 0  # the other rank's report is missing
    solver.observe(report(7, "rank-1", 8))
    assert model.num_steps == 1
    solver.observe(report(7, "rank-1", 8))
    assert model.num_steps == 1  # repeated
    for name in RANKS:
        solver.observe(report(8, name, 8, num_prefill_tokens=5))
    for name in RANKS:
        solver.observe(report(9, name, 0))
    assert model.num_steps == 1


def test_what_the_model_has_learned_changes_the_plan() -> None:
    """Steps that last as if a token of the group cost a second make verifying not worth it."""
    solver = JointSolver([RANKS])
    views = [view(name, 8, measured()) for name in RANKS]
    solver(views, 0.0)
    before = solver.plan_of("rank-0")
    rng = np.random.default_rng(0)
    for step in range(400):
        tokens = rng.integers(8, 40, 2)
        for name, used in zip(RANKS, tokens, strict=True):
            seconds = 1.0 + 0.5 * float(tokens.sum() - 16)
            solver.observe(
                report(step, name, 8, batch_tokens=int(used), step_time_s=seconds, context_tokens=0)
            )
    solver(views, 0.0)
    after = solver.plan_of("rank-0")
    assert before is not None and after is not None
    assert before.max_draft_tokens.sum() > 0
    assert after.max_draft_tokens.sum() < before.max_draft_tokens.sum() / 2


def test_a_group_whose_predictions_have_parted_falls_back_and_says_so() -> None:
    solver = JointSolver([RANKS])
    views = [view(name, 8, measured()) for name in RANKS]
    solver(views, 0.0)
    rng = np.random.default_rng(1)
    for step in range(100):
        for name in RANKS:
            solver.observe(report(step, name, 8, step_time_s=float(np.exp(rng.uniform(-4, 4)))))
    budgets = solver(views, 0.0)
    assert [budget.rule for budget in budgets] == [MISTRUSTED] * 2
    expected = lagged_budget(views[0].survivals, views[0].times)
    assert budgets[0].max_draft_tokens == expected.max_draft_tokens
    assert solver.num_fallbacks == 1


def test_the_margin_over_the_best_common_length_reaches_the_plan() -> None:
    solver = JointSolver([RANKS])
    views = [view("rank-0", 30, measured()), view("rank-1", 3, measured())]
    free = solver(views, 0.0)
    bound = solver(views, 10.0)
    assert {budget.rule for budget in free} == {"joint"}
    assert {budget.rule for budget in bound} <= {"uniform", "none"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_order_of_the_views_changes_nothing(order: tuple[int, int]) -> None:
    views = [view("rank-0", 30, measured()), view("rank-1", 3, measured())]
    straight = JointSolver([RANKS])(views, 0.0)
    turned = JointSolver([RANKS])([views[at] for at in order], 0.0)
    assert turned == [straight[at] for at in order]


def test_the_class_of_the_rows_weighs_in_the_group_s_plan() -> None:
    """The crowd's rank is trimmed for the sake of the others, unless the crowd is what counts."""
    classes = [ServiceClass("crowd", weight=20.0), ServiceClass("others")]
    plans = []
    for prices in (None, ClassPrices(classes)):
        solver = JointSolver([RANKS], prices=prices)
        brain = allocator(solver)
        for class_id, (name, rows) in enumerate(zip(RANKS, (40, 20), strict=True)):
            ids = np.full(rows, class_id, np.int32)
            brain.fold(report(7, name, rows, confidence=0.85, class_ids=ids), 0.0)
        plans.append([budget.max_draft_tokens for budget in brain.budgets(0.0)])
    plain, weighed = plans
    assert weighed[0] > plain[0]


def test_now_and_then_one_rank_verifies_less_or_more_so_that_the_model_can_learn() -> None:
    solver = JointSolver([RANKS])
    views = [view("rank-0", 30, measured()), view("rank-1", 3, measured())]
    plans = [[(b.max_draft_tokens, b.rule) for b in solver(views, 0.0)] for _ in range(4 * 64)]
    usual = plans[0]
    unusual = {at: plan for at, plan in enumerate(plans, 1) if plan != usual}
    most = [tokens for tokens, _ in usual]
    assert unusual == {
        64: [(most[0] // 2, "explore"), usual[1]],
        128: [usual[0], (most[1] + 3, "explore")],
        192: [usual[0], (most[1] // 2, "explore")],
        256: [(most[0] + 30, "explore"), usual[1]],
    }
    calm = JointSolver([RANKS], explores=False)
    assert all(calm(views, 0.0)[0].rule == "joint" for _ in range(130))


def slower(factor: float, identity: str = "here") -> RankTimes:
    times = RankTimes()
    times.measured(replace(CURVE, step_time_s=CURVE.step_time_s * factor, identity=identity))
    return times


def test_ranks_of_one_kind_are_one_curve_and_keep_how_much_slower_each_is() -> None:
    names = [f"rank-{at}" for at in range(5)]
    solver = JointSolver([names])
    factors = [1.0, 1.02, 0.98, 1.0, 1.3]
    views = [view(name, 8, slower(factor)) for name, factor in zip(names, factors, strict=True)]
    solver(views, 0.0)
    plan, model = solver.plan_of("rank-0"), solver.model_of("rank-0")
    assert plan is not None and model is not None
    assert model.rank_scale.tolist() == pytest.approx(factors)
    assert plan.step_time_s >= float(CURVE.verify_time_s(8)) * 1.3
    learned = model.rank_scale = np.array([1.0, 1.0, 1.0, 1.2, 1.3])
    solver(views, 0.0)
    assert model.rank_scale is learned  # the same curves: nothing starts afresh
    views[0] = view("rank-0", 8, slower(1.1))
    solver(views, 0.0)
    assert model.rank_scale.tolist() == pytest.approx([1.1, 1.02, 0.98, 1.0, 1.3], rel=0.02)


def test_ranks_of_different_kinds_keep_their_own_curves() -> None:
    solver = JointSolver([RANKS])
    solver([view("rank-0", 8, slower(1.0)), view("rank-1", 8, slower(3.0, "old node"))], 0.0)
    plan, model = solver.plan_of("rank-0"), solver.model_of("rank-0")
    assert plan is not None and model is not None
    assert model.rank_scale.tolist() == [1.0, 1.0]
    assert plan.step_time_s >= 3 * float(CURVE.verify_time_s(8))


def test_a_group_of_one_is_planned_as_the_rank_would_by_itself() -> None:
    alone = view("rank-0", 12, measured())
    (budget,) = JointSolver([["rank-0"]])([alone], 0.0)
    expected = lagged_budget(alone.survivals, alone.times)
    assert budget.max_draft_tokens == expected.max_draft_tokens
    assert budget.min_survival == pytest.approx(expected.min_survival)


def test_a_late_report_does_not_complete_a_newer_step() -> None:
    solver = JointSolver([RANKS])
    model = solver.model_of("rank-0")
    assert model is not None
    solver([view(name, 8, measured()) for name in RANKS], 0.0)
    solver.observe(report(8, "rank-0", 8))
    solver.observe(report(7, "rank-1", 8))
    assert model.num_steps == 0
    solver.observe(report(8, "rank-1", 8))
    assert model.num_steps == 1
