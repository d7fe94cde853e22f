"""Ranks that share a machine without waiting for each other: what the joint solver learns, forgets and prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.capacity import Allocator
from actors.core.classes import ClassPrices
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, StepReport
from actors.core.service_class import ServiceClass
from actors.core.sps import CostCurve
from tests.pure.test_lockstep_solver import GAMMA, RANKS, allocator, profile, report


def shared(**options: object) -> JointSolver:
    return JointSolver([RANKS], is_lockstep=False, **options)  # type: ignore[arg-type]


def proposed(blocks: int) -> np.ndarray:
    return np.full(GAMMA, blocks, np.int64)


def again(old: StepReport, epoch: str) -> StepReport:
    return replace(old, rank=Endpoint(old.rank.name, "target", "", "", epoch))


def served(brain: Allocator, solver: JointSolver) -> int:
    model = solver.model_of("rank-0")
    assert model is not None
    return model.num_steps


def test_a_step_of_the_group_is_the_newest_step_of_each_rank_that_runs() -> None:
    solver = shared()
    brain = allocator(solver)
    for name in RANKS:
        brain.fold(report(1, name, 8), 0.0)
    brain.budgets(0.0)  # the views bring the curves
    brain.fold(report(70, "rank-0", 8), 0.0)
    before = served(brain, solver)
    for step in (71, 72):
        brain.fold(report(step, "rank-0", 8), 0.0)
    assert served(brain, solver) == before  # the other has not spoken
    brain.fold(report(5, "rank-1", 8), 0.0)
    assert served(brain, solver) == before + 1
    idle = report(6, "rank-1", 0, batch_tokens=0)
    brain.fold(idle, 0.0)
    learned = served(brain, solver)
    for step in (73, 74):
        brain.fold(report(step, "rank-0", 8), 0.0)
    assert served(brain, solver) == learned + 2  # nobody waits for a rank that does nothing


def test_a_rank_s_own_time_corrects_its_own_curve_and_the_time_of_a_group_does_not() -> None:
    """Left alone, a rank plans by its own curve: the time it waited for others has no place in it."""
    ratios = []
    for is_lockstep in (True, False):
        brain = allocator(JointSolver([RANKS], is_lockstep=is_lockstep))
        for step in range(40):
            for name in RANKS:
                brain.fold(report(step, name, 8, step_time_s=9.0), 0.0)
        ratios.append(float(brain._ranks["rank-0"].times.served.ratio(16)))
    assert ratios[0] == 1.0
    assert ratios[1] > 2.0


def test_a_rank_that_does_not_draft_is_not_charged_for_drafting() -> None:
    steps = []
    for blocks in (0, 8):
        solver = shared(explores=False)
        brain = Allocator(solver=solver)
        for name in RANKS:
            shape = profile(name)
            brain.fold(replace(shape, draft_time_s=np.full(len(shape.batch_tokens), 0.5)), 0.0)
        for name in RANKS:
            brain.fold(report(3, name, 8, num_proposed=proposed(blocks)), 0.0)
        brain.budgets(0.0)
        plan = solver.plan_of("rank-0")
        assert plan is not None
        steps.append((plan.step_time_s, plan.max_draft_tokens.tolist()))
    (without, drafts), (drafting, same) = steps
    assert drafts == same
    assert drafting == pytest.approx(without + 0.5)


def test_the_time_of_a_step_without_drafting_is_learned_as_that() -> None:
    solver = shared()
    brain = Allocator(solver=solver)
    for name in RANKS:
        shape = profile(name)
        brain.fold(replace(shape, draft_time_s=np.full(len(shape.batch_tokens), 0.5)), 0.0)
    exact = float(CostCurve.of(profile("rank-0")).verify_time_s(16))
    for step in range(60):
        for name in RANKS:
            brain.fold(report(step, name, 8, step_time_s=exact), 0.0)
        brain.budgets(0.0)
    assert solver.prediction_error("rank-0") == pytest.approx(0.0, abs=0.02)


def test_a_rank_that_is_gone_or_another_weighs_in_no_plan_any_more() -> None:
    for ends in ("forgotten", "reborn"):
        solver = shared(explores=False)
        brain = allocator(solver)
        brain.fold(report(7, "rank-0", 40), 0.0)
        brain.fold(report(7, "rank-1", 4), 0.0)
        brain.budgets(0.0)
        crowded = solver.plan_of("rank-1")
        assert crowded is not None and crowded.max_draft_tokens[0] > 0
        if ends == "forgotten":
            brain.forget("rank-0")
        else:
            brain.fold(again(report(0, "rank-0", 0, batch_tokens=0), "b"), 0.0)
        brain.fold(report(8, "rank-1", 4), 0.0)
        brain.budgets(0.0)
        plan = solver.plan_of("rank-1")
        assert plan is not None and plan.max_draft_tokens[0] == 0


def test_the_steps_of_a_lockstep_group_that_was_reborn_count_from_the_beginning() -> None:
    solver = JointSolver([RANKS])
    brain = allocator(solver)
    for name in RANKS:
        brain.fold(report(900, name, 8), 0.0)
    brain.budgets(0.0)
    before = served(brain, solver)
    for name in RANKS:
        solver.observe(again(report(0, name, 8), "b"))
    for name in RANKS:
        solver.observe(again(report(1, name, 8), "b"))
    assert served(brain, solver) == before  # no view, and so no curve, of the new incarnations
    for name in RANKS:
        brain.fold(replace(profile(name), rank=Endpoint(name, "target", "", "", "b")), 0.0)
        brain.fold(again(report(2, name, 8), "b"), 0.0)
    brain.budgets(0.0)
    for name in RANKS:
        brain.fold(again(report(3, name, 8), "b"), 0.0)
    assert served(brain, solver) == before + 1


def test_a_solver_that_shall_not_learn_keeps_its_model() -> None:
    solver = shared(learns=False)
    brain = allocator(solver)
    for step in range(5):
        for name in RANKS:
            brain.fold(report(step, name, 8, step_time_s=50.0), 0.0)
        brain.budgets(0.0)
    assert served(brain, solver) == 0


def priced(solver: JointSolver, prices: ClassPrices, is_lockstep: bool) -> None:
    for name, seconds, tokens in (("rank-0", 2.0, [4, 2]), ("rank-1", 1.0, [3, 3])):
        solver.observe(
            report(
                1, name, 2,
                step_time_s=seconds,
                class_ids=np.array([0, 1], np.int32),
                row_committed=np.array(tokens, np.int32),
            )
        )  # fmt: skip


def test_the_speed_of_a_class_is_what_its_rows_got_by_the_time_of_their_own_rank() -> None:
    classes = [ServiceClass("a"), ServiceClass("b")]
    together, apart = ClassPrices(classes), ClassPrices(classes)
    priced(JointSolver([RANKS], prices=together), together, True)
    assert together.speed.tolist() == [(4 + 3) / (2 * 2.0), (2 + 3) / (2 * 2.0)]
    priced(shared(prices=apart), apart, False)
    assert apart.speed.tolist() == pytest.approx([0.9 * 2 + 0.1 * 3, 0.9 * 1 + 0.1 * 3])
    silent = ClassPrices(classes)
    solver = shared(prices=silent)
    solver.observe(report(1, "rank-0", 2))  # says nothing of classes
    solver.observe(report(2, "rank-0", 2, step_time_s=0.0))
    assert np.isnan(silent.speed).all()


def test_budgets_of_a_plan_with_classes_carry_their_weights_and_others_do_not() -> None:
    prices = ClassPrices([ServiceClass("a", weight=3.0), ServiceClass("b")])
    brain = allocator(shared(prices=prices))
    brain.fold(report(7, "rank-0", 4), 0.0)
    (budget,) = brain.budgets(0.0)
    assert budget.class_weights == pytest.approx((1.0, 1 / 3))
    plain = allocator(shared())
    plain.fold(report(7, "rank-0", 4), 0.0)
    assert plain.budgets(0.0)[0].class_weights == ()
