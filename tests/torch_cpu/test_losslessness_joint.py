"""C1 and C3 for joint budgets and classes: ranks that are planned together keep every request's law, exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.core.capacity import Allocator
from actors.core.classes import ClassPrices, plan_classes
from actors.core.group_times import GroupTimes
from actors.core.joint import plan_group
from actors.core.local_policy import LocalPolicy
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, RankProfile, StepReport, VerifyBudget
from actors.core.prefix_scheduler import allocate
from actors.core.service_class import ClassAllocation, ServiceClass, allocate_classes
from actors.core.verify_decision import VerifyDecider
from tests.torch_cpu.exact_law import Scheduler
from tests.torch_cpu.test_losslessness import (
    APPENDIX_A,
    JAGGED,
    PARAMS,
    PLAIN,
    appendix_a,
    first_token_law,
    law_error,
)
from tests.torch_cpu.tiny_pair import TinyPair

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

CLASSES = [ServiceClass("a", weight=2.0), ServiceClass("b"), ServiceClass("c", min_verify_len=1)]
RULES = {name: PARAMS[name] for name in ("greedy", "plain", "hot", "top_k and top_p")}


def times(requests: Int64, curve: object = JAGGED) -> GroupTimes:
    n = len(requests)
    return GroupTimes((curve,) * n, np.ones(n), np.zeros(n), requests)  # type: ignore[arg-type]


def by_report(requests: Int64, confidence: float) -> Scheduler:
    """Budgets of the allocator for step 9, from reports of step 7, on ranks of so many requests each."""
    names = [f"rank-{at}" for at in range(len(requests))]
    brain = Allocator(solver=JointSolver([names]))
    none, zeros = np.zeros(9), np.zeros(2, np.int64)
    for name, rows in zip(names, requests, strict=True):
        rank = Endpoint(name, "target", "", "", "1")
        points = JAGGED.batch_tokens.astype(np.int32)
        brain.fold(RankProfile(rank, "here", points, points, JAGGED.step_time_s, none, 2), 0.0)
        stale = np.cumprod(np.full((rows, 2), confidence, np.float32), axis=1)
        counts = (int(rows), 0, int(rows), 0)
        brain.fold(
            StepReport(rank, 7, 1.0, 0.0, *counts, stale, *[zeros] * 3, 0, 0, 0, 0, "", 0), 0.0
        )
    budgets = brain.budgets(0.0)
    ends = np.concatenate([[0], np.cumsum(requests)])

    def schedule(survival: Float32) -> Int32:
        lens = [
            allocate(
                survival[ends[at] : ends[at + 1]], b.max_draft_tokens, b.min_survival,
                np.full(requests[at], 2),
            )
            for at, b in enumerate(budgets)
        ]  # fmt: skip
        return np.concatenate(lens)

    return schedule


def by_class(stale: Float32) -> Scheduler:
    """One rank whose slots are ranked by worth, inside a plan made from stale survivals."""
    prices, ids = ClassPrices(CLASSES), np.arange(len(stale)) % 3
    plan = plan_classes(stale, ids, np.array([len(stale)]), times(np.array([len(stale)])), prices)
    (budget,) = plan.budgets()

    def schedule(survival: Float32) -> Int32:
        return allocate_classes(
            survival,
            budget.max_draft_tokens,
            budget.min_survival,
            np.full(len(survival), 2),
            ids,
            prices.classes,
            prices.weights().tolist(),
        )

    return schedule


def pairs(seeds: tuple[int, ...]) -> list[TinyPair]:
    return [TinyPair.random(seed, gamma=2, vocab=3, dtype=torch.float64) for seed in seeds]


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", RULES)
def test_ranks_planned_together_keep_every_law(name: str, confidence: float) -> None:
    schedule = by_report(np.array([1, 2]), confidence)
    assert law_error(pairs((5, 6, 7)), [RULES[name]] * 3, schedule, draft_top_k=3) < 1e-9


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("name", RULES)
def test_ranking_by_the_worth_of_a_class_keeps_every_law(name: str, confidence: float) -> None:
    stale = np.cumprod(np.full((3, 2), confidence, np.float32), axis=1)
    assert law_error(pairs((8, 9, 10)), [RULES[name]] * 3, by_class(stale), draft_top_k=3) < 1e-9


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_a_rank_s_own_decision_with_classes_keeps_every_law(name: str, with_weights: bool) -> None:
    """The decider that serves: under a budget with weights, and alone, where they only say who comes first."""
    policy = LocalPolicy("lagged")
    policy.times.measured(JAGGED)

    def schedule(survival: Float32) -> Int32:
        decider = VerifyDecider("rank", "1", policy, allocate, classes=ClassAllocation(CLASSES))
        if with_weights:
            decider.budgets.offer(
                VerifyBudget("rank", "1", 7, 9, 9, 3, 0.1, "", (1.0, 0.5, 0.5)), 9
            )
        rows, gamma = survival.shape
        everyone = np.full(rows, gamma, np.int32)
        stale, ids = np.full(survival.shape, 0.4, np.float32), np.arange(rows, dtype=np.int32)
        for step, seen in ((6, stale), (7, stale**2), (9, survival)):
            decision = decider.decide(
                step, ("a",) * rows, seen, everyone, everyone > 0, 9, 0, 0, class_ids=ids
            )
        return decision.verify_len

    assert law_error(pairs((8, 9, 10)), [RULES[name]] * 3, schedule, draft_top_k=3) < 1e-9


def joint_on(seen: Callable[[Float32], Float32]) -> Scheduler:
    """Appendix A's request, planned jointly on what `seen` makes of the current survivals."""

    def schedule(survival: Float32) -> Int32:
        requests = np.array([len(survival)])
        plan = plan_group(seen(survival), requests, times(requests, APPENDIX_A))
        (budget,) = plan.budgets()
        caps = np.full(len(survival), 2)
        return allocate(survival, budget.max_draft_tokens, budget.min_survival, caps)

    return schedule


@pytest.mark.parametrize("stale", [0.1, 0.5, 0.99])
def test_appendix_a_a_joint_plan_on_stale_survivals_keeps_seventy_percent(stale: float) -> None:
    schedule = joint_on(lambda survival: np.full_like(survival, stale))
    assert first_token_law(schedule) == pytest.approx(0.7, abs=1e-9)


def test_appendix_a_a_joint_plan_on_current_survivals_is_caught() -> None:
    current = joint_on(lambda survival: survival)
    assert first_token_law(current) == pytest.approx(0.85, abs=1e-9)
    assert law_error([appendix_a()], [PLAIN], current, draft_top_k=2) > 0.1


def test_weights_moved_by_the_current_draft_are_caught() -> None:
    """A class whose weight follows this step's survivals looks ahead, however fair the intention."""

    def schedule(survival: Float32) -> Int32:
        classes = [
            ServiceClass("a", weight=float(1.0 + 9.0 * survival[0, 1])),
            ServiceClass("b", weight=2.0),
        ]
        weights = ClassPrices(classes).weights().tolist()
        return allocate_classes(survival, 1, 0.0, np.full(2, 2), np.array([0, 1]), classes, weights)

    both = [appendix_a(), appendix_a()]
    assert law_error(both, [PLAIN, PLAIN], schedule, draft_top_k=2) > 1e-3
