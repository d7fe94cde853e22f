"""The policies as `exact_steps.Planner`s: the deciders and the allocator that serve, fed step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from actors.core.budget_solver import BudgetSolver, EachAlone
from actors.core.capacity import Allocator
from actors.core.classes import ClassPrices
from actors.core.local_policy import LocalPolicy
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, RankProfile, StepReport, VerifyBudget
from actors.core.prefix_scheduler import allocate
from actors.core.service_class import ClassAllocation, ServiceClass
from actors.core.sps import CostCurve
from actors.core.verify_decision import StepFacts, VerifyDecider
from tests.torch_cpu.exact_steps import StepRows

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

LAG = 2
ROOM = 99
RANKS = ("rank-0", "rank-1")


class LocalPlanner:
    """A rank that decides by itself, both requests on it. `lag` other than two is for mutants."""

    def __init__(
        self, make: Callable[[], LocalPolicy], curve: CostCurve, prefill: tuple[int, ...] = (0,)
    ) -> None:
        self._make, self._curve, self._prefill = make, curve, prefill
        self._alike: dict[Hashable, Float32] = {}  # what it would choose: survivals that lead to it
        self._survivals: dict[Hashable, Float32] = {}
        self._lens: dict[Hashable, Int32] = {}

    def policy(self) -> LocalPolicy:
        policy = self._make()
        policy.times.measured(self._curve)
        return policy

    def memory(self, rows: StepRows, before: Hashable) -> Hashable:
        if not rows.has_draft.any():
            return before
        key = rows.survivals.tobytes()
        if key not in self._survivals:
            policy = self.policy()
            none = np.zeros((1, rows.survivals.shape[1]), np.float32)
            facts = (
                StepFacts(9, none, np.ones(1, np.int32), 7, rows.survivals, prefill, 0)
                for prefill in self._prefill
            )
            choices = tuple(policy.choose(each) for each in facts)
            self._survivals[key] = self._alike.setdefault(choices, rows.survivals)
        return self._survivals[key].tobytes()

    def verify_len(self, memory: Hashable, rows: StepRows) -> Int32:
        key = (memory, rows.key)
        if key not in self._lens:
            decider = VerifyDecider(RANKS[0], "1", self.policy(), allocate)
            if memory is not None:
                self._decide(decider, self._old(rows, memory))
            self._lens[key] = self._decide(decider, rows)
        return self._lens[key]

    def _old(self, rows: StepRows, memory: Hashable) -> StepRows:
        survivals = self._survivals[memory]
        count, gamma = survivals.shape
        full = np.full(count, gamma, np.int32)
        return StepRows(rows.step - LAG, tuple(range(count)), survivals, full, full > 0, 0)

    @staticmethod
    def _decide(decider: VerifyDecider, rows: StepRows) -> Int32:
        ids = tuple(map(str, rows.requests))
        prefill = rows.num_prefill_tokens
        return decider.decide(
            rows.step, ids, rows.survivals, rows.caps, rows.has_draft, ROOM, prefill, 0
        ).verify_len


class AllocatorPlanner:
    """Budgets of the allocator from reports two steps old.

    Args:
        num_ranks: one: both requests are on one rank; two: each is on a rank of its own.
        joint: the ranks are planned as one group, else each by itself.
        classes: of the first and the second request; they weigh in the plan and on the rank.
    """

    def __init__(
        self,
        curve: CostCurve,
        num_ranks: int = 1,
        *,
        joint: bool = False,
        classes: Sequence[ServiceClass] = (),
    ) -> None:
        self._curve, self._num_ranks, self._joint = curve, num_ranks, joint
        self._classes = tuple(classes)
        self._budgets: dict[Hashable, tuple[VerifyBudget, ...]] = {}
        self._lens: dict[Hashable, Int32] = {}

    def rank_of(self, request: int) -> str:
        return RANKS[request % self._num_ranks]

    def memory(self, rows: StepRows, before: Hashable) -> Hashable:
        key = (rows.requests, rows.survivals.tobytes(), rows.num_prefill_tokens)
        if key not in self._budgets:
            self._budgets[key] = self._plan(rows)
        # The numbers of the steps are the only difference between plans made at different times.
        fresh = {
            b.rank: (b.max_draft_tokens, b.min_survival, b.class_weights)
            for b in self._budgets[key]
        }
        # A rank that gets no new budget goes on under its last one.
        assert before is None or isinstance(before, tuple)
        return tuple(sorted({**dict(before or ()), **fresh}.items())) or None

    def _solver(self) -> BudgetSolver:
        if not self._joint:
            return EachAlone()
        prices = ClassPrices(self._classes) if self._classes else None
        return JointSolver([list(RANKS[: self._num_ranks])], prices=prices)

    def _plan(self, rows: StepRows) -> tuple[VerifyBudget, ...]:
        brain = Allocator(solver=self._solver())
        points = self._curve.batch_tokens.astype(np.int32)
        no_time, none = np.zeros(len(points)), np.zeros(rows.survivals.shape[1], np.int64)
        for name in RANKS[: self._num_ranks]:
            rank = Endpoint(name, "target", "", "", "1")
            times = self._curve.step_time_s
            brain.fold(RankProfile(rank, "", points, points, times, no_time, len(none)), 0.0)
            mine = self._mine(name, rows)
            prefill = rows.num_prefill_tokens
            counts = (len(mine), prefill, len(mine) + prefill, 0)
            report = (1.0, 0.0, *counts, rows.survivals[mine], none, none, none, 0, 0, 0, 0, "", 0)
            ids = np.array([rows.requests[row] for row in mine], np.int32)
            brain.fold(StepReport(rank, rows.step, *report, class_ids=ids), 0.0)
        return tuple(brain.budgets(0.0))

    def _mine(self, name: str, rows: StepRows) -> list[int]:
        return [row for row, request in enumerate(rows.requests) if self.rank_of(request) == name]

    def verify_len(self, memory: Hashable, rows: StepRows) -> Int32:
        key = (memory, rows.key)
        if key not in self._lens:
            lens = np.zeros(len(rows.requests), np.int32)
            for name in {self.rank_of(request) for request in rows.requests}:
                mine = self._mine(name, rows)
                lens[mine] = self._decide(name, memory, rows, mine)
            self._lens[key] = lens
        return self._lens[key]

    def _decide(self, name: str, memory: Hashable, rows: StepRows, mine: list[int]) -> Int32:
        policy = LocalPolicy("lagged")
        policy.times.measured(self._curve)
        weighed = ClassAllocation(self._classes) if self._classes else None
        decider = VerifyDecider(name, "1", policy, allocate, classes=weighed)
        assert memory is None or isinstance(memory, tuple)
        for rank, (most, price, weights) in memory or ():
            if rank == name:
                steps = (rows.step - LAG, rows.step, rows.step)
                budget = VerifyBudget(name, "1", *steps, most, price, class_weights=weights)
                decider.budgets.offer(budget, rows.step)
        return decider.decide(
            rows.step,
            tuple(str(rows.requests[row]) for row in mine),
            rows.survivals[mine],
            rows.caps[mine],
            rows.has_draft[mine],
            ROOM,
            rows.num_prefill_tokens,
            0,
            class_ids=np.array([rows.requests[row] for row in mine], np.int32),
        ).verify_len
