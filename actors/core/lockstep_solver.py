"""Budgets for ranks that share a step or a machine: a `BudgetSolver` for the allocator, joint within each group.

It learns the step time of each group from the reports of its ranks. Where a group cannot be planned jointly (no curve
yet, a flat one, or predictions that have parted from what is served), each of its ranks gets the budget it would
have chosen by itself, and the rule says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from actors.core.budget_solver import RankView
from actors.core.classes import ClassPrices, plan_classes
from actors.core.cost import LockstepModel, RankStep
from actors.core.group_times import SharedTime
from actors.core.joint import JointPlan, plan_group
from actors.core.messages import StepReport
from actors.core.prefix_scheduler import MIN_SURVIVAL, Budget, lagged_budget
from actors.core.rank_group import RankGroup, num_blocks

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

MISTRUSTED = "model_mistrusted"
EXPLORE_EVERY = 64  # plans of a group; a model only knows the loads it has seen


class JointSolver:
    """One for all groups of a cluster. A rank that is in no group is planned by itself.

    Attributes:
        num_fallbacks: plans that were left to the ranks, because the model of their group was not to be trusted.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        shared: SharedTime | None = None,
        prices: ClassPrices | None = None,
        explores: bool = True,
        is_lockstep: bool = True,
        learns: bool = True,
    ) -> None:
        """
        Args:
            groups: names of the ranks of each group.
            shared: what is known of g (`group_times.split_profiles`); it is learned in any case.
            prices: weigh requests by class; reports then say the class of each row.
            explores: now and then let one rank verify less or more than planned, so that the model can learn.
            is_lockstep: the ranks of a group wait for each other, and number their steps alike. Otherwise they only
                share what they run on: the newest step of each then stands for a step of the group.
            learns: correct the model by served steps.
        """
        self._groups: dict[str, RankGroup] = {}
        for ranks in groups:
            group = RankGroup(tuple(ranks), LockstepModel(len(ranks), shared))
            self._groups.update(dict.fromkeys(ranks, group))
        self.prices, self.explores = prices, explores
        self._is_lockstep, self._learns = is_lockstep, learns
        self.num_fallbacks = 0

    def model_of(self, rank: str) -> LockstepModel | None:
        """The step-time model of a rank's group; its `prediction_error` is exported."""
        group = self._groups.get(rank)
        return group.model if group else None

    def plan_of(self, rank: str) -> JointPlan | None:
        """The newest joint plan of a rank's group."""
        group = self._groups.get(rank)
        return group.plan if group else None

    def prediction_error(self, rank: str) -> float | None:
        group = self._groups.get(rank)
        return group.model.prediction_error if group else None

    def forget(self, rank: str) -> None:
        if rank in self._groups:
            self._groups[rank].forget(rank)

    def observe(self, report: StepReport) -> bool:
        """Learn from a step once the ranks of the group have reported it; see `BudgetSolver.observe`."""
        group = self._groups.get(report.rank.name)
        if group is None:
            return True
        group.note(report)
        is_whole = group.completed(report) if self._is_lockstep else group.is_renewed(report)
        known = list(group.reports.values()) if is_whole else []
        served_s = max((r.step_time_s + r.draft_wait_s for r in known), default=0.0)
        if self._learns and served_s:
            self._learn(group, served_s)
        if self._is_lockstep:
            self._price(known, served_s)
        else:
            self._price([report], report.step_time_s + report.draft_wait_s)
        return not self._is_lockstep

    @staticmethod
    def _learn(group: RankGroup, served_s: float) -> None:
        """From the newest report of every rank. Steps with prefill cost differently."""
        known = group.reports.values()
        plain = not any(r.num_prefill_tokens for r in known)
        curves = group.curves()
        if curves and plain and any(r.num_requests for r in known):
            group.model.fold(
                [group.last_step(*pair) for pair in zip(group.ranks, curves, strict=True)],
                served_s,
                [group.own_time_s(rank) for rank in group.ranks],
            )

    def _price(self, reports: Sequence[StepReport], seconds: float) -> None:
        """Let the weights of the classes follow what this step brought each of them."""
        if self.prices is None or seconds <= 0:
            return
        num = len(self.prices.classes)
        rounds, tokens = np.zeros(num, np.int64), np.zeros(num)
        for report in reports:
            if report.row_committed is None or report.class_ids is None:
                continue
            rounds += np.bincount(report.class_ids, minlength=num)
            tokens += np.bincount(report.class_ids, weights=report.row_committed, minlength=num)
        if rounds.any():
            self.prices.observe(rounds, tokens, seconds)

    def __call__(self, views: list[RankView], min_predicted_gain: float) -> list[Budget]:
        """One budget a view. Ranks of a group without a new view count with the last they showed."""
        for view in views:
            group = self._groups.get(view.rank)
            if group is not None:
                group.views[view.rank] = view
        planned: dict[str, Budget] = {}
        budgets = []
        for view in views:
            group = self._groups.get(view.rank)
            if group is not None and view.rank not in planned:
                planned.update(self._plan(group, min_predicted_gain))
            budgets.append(planned.get(view.rank) or _alone(view, min_predicted_gain))
        return budgets

    def _plan(self, group: RankGroup, min_predicted_gain: float) -> dict[str, Budget]:
        """Budgets of all ranks of a group, or none where the group has to be left to its ranks."""
        if not group.model.is_trusted:
            group.plan = None
            self.num_fallbacks += 1
            return {
                rank: _named(_alone(view, min_predicted_gain), MISTRUSTED)
                for rank, view in group.views.items()
            }
        curves = group.curves()
        if not curves or any(curve.is_flat for curve in curves):
            return {}
        rows = [group.survivals(rank) for rank in group.ranks]
        requests = np.array([len(survivals) for survivals in rows], np.int64)
        steps = []
        for rank, curve, shown in zip(group.ranks, curves, rows, strict=True):
            view, report = group.views.get(rank), group.reports.get(rank)
            tokens = len(shown) + (view.num_other_tokens if view else 0)
            # Whoever asked for no block in the newest step will hardly ask for one in the planned step.
            blocks = num_blocks(report) if report else len(shown)
            context = report.context_tokens if report else 0
            steps.append(RankStep(curve, blocks, tokens, context))
        times = group.model.times(steps)
        incumbent = group.plan.max_draft_tokens if group.plan else None
        survivals = np.concatenate(rows)
        if self.prices is None:
            group.plan = plan_group(
                survivals, requests, times, min_predicted_gain, incumbent=incumbent
            )
        else:
            ids = np.concatenate(
                [
                    group.class_ids(rank, len(shown))
                    for rank, shown in zip(group.ranks, rows, strict=True)
                ]
            )
            group.plan = plan_classes(
                survivals, ids, requests, times, self.prices, min_predicted_gain, incumbent
            )
        group.num_plans += 1
        weights = () if self.prices is None else tuple(self.prices.weights().tolist())
        planned = [replace(budget, class_weights=weights) for budget in group.plan.budgets()]
        budgets = dict(zip(group.ranks, planned, strict=True))
        if self.explores and group.num_plans % EXPLORE_EVERY == 0:
            self._explore(group, requests, budgets)
        return budgets

    def _explore(self, group: RankGroup, requests: Int64, budgets: dict[str, Budget]) -> None:
        """One rank, each in turn, verifies half as much for one step, or a token a request more the next time.

        Which and when follows from the number of plans alone, so it says nothing about a draft.
        """
        turn = group.num_plans // EXPLORE_EVERY
        at = turn // 2 % len(group.ranks)
        rank, usual = group.ranks[at], budgets[group.ranks[at]]
        most, price = usual.max_draft_tokens // 2, usual.min_survival
        if not turn % 2:
            most, price = usual.max_draft_tokens + int(requests[at]), MIN_SURVIVAL
        budgets[rank] = replace(usual, max_draft_tokens=most, min_survival=price, rule="explore")


def _alone(view: RankView, min_predicted_gain: float) -> Budget:
    return lagged_budget(view.survivals, view.times, view.num_other_tokens, min_predicted_gain)


def _named(budget: Budget, rule: str) -> Budget:
    return Budget(budget.max_draft_tokens, budget.min_survival, rule)
