"""Budgets for ranks that step together: a `BudgetSolver` for the allocator, joint within each lockstep group.

It learns the step time of each group from the reports of its ranks. Where a group cannot be planned jointly (no curve
yet, a flat one, or predictions that have parted from what is served), each of its ranks gets the budget it would
have chosen by itself, and the rule says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import is_

import numpy as np
import numpy.typing as npt

from actors.core.capacity import RankView
from actors.core.classes import ClassPrices, plan_classes
from actors.core.cost import LockstepModel, RankStep
from actors.core.group_times import SharedTime
from actors.core.joint import JointPlan, plan_group
from actors.core.messages import StepReport
from actors.core.prefix_scheduler import MIN_SURVIVAL, Budget, lagged_budget
from actors.core.sps import CostCurve

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

MISTRUSTED = "model_mistrusted"
EXPLORE_EVERY = 64  # plans of a group; a model only knows the loads it has seen


@dataclass
class _Group:
    """What is known of one group: its model, and the newest report and view of each of its ranks."""

    ranks: tuple[str, ...]
    model: LockstepModel
    reports: dict[str, StepReport] = field(default_factory=dict)
    views: dict[str, RankView] = field(default_factory=dict)
    class_ids: dict[str, Int64] = field(default_factory=dict)  # of the rows of each rank's report
    newest_step: int = -1
    reported: set[str] = field(default_factory=set)  # ranks that have reported the newest step
    learned_step: int = -1
    num_plans: int = 0
    plan: JointPlan | None = None
    _measured: list[CostCurve | None] = field(default_factory=list)
    _shared_curves: list[CostCurve] = field(default_factory=list)

    def curves(self) -> list[CostCurve]:
        """The curve of every rank; empty while none is known. A rank that never ran is taken to be like the first.

        Ranks of one identity share the median of their curves, and keep how much slower each was measured as the
        first guess of its own factor: a thousand ranks of one kind are then one curve.
        """
        measured = [view.times.curve for view in self.views.values()]
        same = len(measured) == len(self._measured) and all(map(is_, measured, self._measured))
        if not same:
            self._measured = measured
            self._shared_curves = self._share()
        return self._shared_curves

    def _share(self) -> list[CostCurve]:
        known = {rank: view.times.curve for rank, view in self.views.items()}
        first = next((curve for curve in known.values() if curve is not None), None)
        if first is None:
            return []
        own = [known.get(rank) or first for rank in self.ranks]
        kinds: dict[str, list[CostCurve]] = {}
        for curve in own:
            kinds.setdefault(curve.identity, []).append(curve)
        typical = {identity: _typical(curves) for identity, curves in kinds.items()}
        slower = [
            np.median(curve.step_time_s / typical[curve.identity].verify_time_s(curve.batch_tokens))
            for curve in own
        ]
        if len(own) > 1:
            self.model.rank_scale = np.array(slower)
        return [typical[curve.identity] for curve in own]

    def survivals(self, rank: str) -> Float32:
        """The last a rank showed; none when it is idle now or never ran."""
        view, report = self.views.get(rank), self.reports.get(rank)
        shown = next(iter(self.views.values())).survivals if view is None else view.survivals
        idle = view is None or (report is not None and not report.num_requests)
        return shown[:0] if idle else shown


class JointSolver:
    """One for all groups of a cluster.

    The shell hands it every report that `Allocator.fold` took in (`observe`), and gives it to the allocator as its
    `solver`. A rank that is in no group is planned by itself.

    Attributes:
        num_fallbacks: plans that were left to the ranks, because the model of their group was not to be trusted.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        shared: SharedTime | None = None,
        prices: ClassPrices | None = None,
        explores: bool = True,
    ) -> None:
        """
        Args:
            groups: names of the ranks of each group.
            shared: what is known of g (`cost.split_profiles`); it is learned in any case.
            prices: weigh requests by class; reports then come with the class of each row (`observe`).
            explores: now and then let one rank verify less or more than planned, so that the model can learn.
        """
        self._groups: dict[str, _Group] = {}
        for ranks in groups:
            group = _Group(tuple(ranks), LockstepModel(len(ranks), shared))
            self._groups.update(dict.fromkeys(ranks, group))
        self.prices, self.explores = prices, explores
        self.num_fallbacks = 0

    def model_of(self, rank: str) -> LockstepModel | None:
        """The step-time model of a rank's group; its `prediction_error` is exported."""
        group = self._groups.get(rank)
        return group.model if group else None

    def plan_of(self, rank: str) -> JointPlan | None:
        """The newest joint plan of a rank's group."""
        group = self._groups.get(rank)
        return group.plan if group else None

    def observe(self, report: StepReport, class_ids: Int64 | None = None) -> None:
        """Learn from a step once all ranks of the group have reported it. Steps with prefill cost differently.

        `class_ids` [R]: the class of each row of the report's survivals; None counts all as the first.
        """
        group = self._groups.get(report.rank.name)
        if group is None:
            return
        group.reports[report.rank.name] = report
        rows = len(report.survivals)
        group.class_ids[report.rank.name] = (
            np.zeros(rows, np.int64) if class_ids is None else class_ids
        )
        if report.step > group.newest_step:
            group.newest_step, group.reported = report.step, set()
        if report.step == group.newest_step:
            group.reported.add(report.rank.name)
        if len(group.reported) < len(group.ranks) or group.newest_step <= group.learned_step:
            return
        group.learned_step = group.newest_step
        complete = [group.reports[rank] for rank in group.ranks]
        curves = group.curves()
        plain = not any(r.num_prefill_tokens for r in complete)
        if curves and plain and any(r.num_requests for r in complete):
            steps = [
                RankStep(curve, r.num_requests, r.batch_tokens, r.context_tokens)
                for curve, r in zip(curves, complete, strict=True)
            ]
            group.model.fold(steps, max(r.step_time_s + r.draft_wait_s for r in complete))

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

    def _plan(self, group: _Group, min_predicted_gain: float) -> dict[str, Budget]:
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
            context = report.context_tokens if report else 0
            steps.append(RankStep(curve, len(shown), tokens, context))
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
                    group.class_ids.get(rank, np.zeros(len(shown), np.int64))[: len(shown)]
                    for rank, shown in zip(group.ranks, rows, strict=True)
                ]
            )
            group.plan = plan_classes(
                survivals, ids, requests, times, self.prices, min_predicted_gain, incumbent
            )
        group.num_plans += 1
        budgets = dict(zip(group.ranks, group.plan.budgets(), strict=True))
        if self.explores and group.num_plans % EXPLORE_EVERY == 0:
            self._explore(group, requests, budgets)
        return budgets

    def _explore(self, group: _Group, requests: Int64, budgets: dict[str, Budget]) -> None:
        """One rank, each in turn, verifies half as much for one step, or a token a request more the next time.

        Which and when follows from the number of plans alone, so it says nothing about a draft.
        """
        turn = group.num_plans // EXPLORE_EVERY
        at = turn // 2 % len(group.ranks)
        rank, most = group.ranks[at], budgets[group.ranks[at]].max_draft_tokens
        if turn % 2:
            budgets[rank] = Budget(most // 2, budgets[rank].min_survival, "explore")
        else:
            budgets[rank] = Budget(most + int(requests[at]), MIN_SURVIVAL, "explore")


def _typical(curves: list[CostCurve]) -> CostCurve:
    """The median of curves measured at the same points as the first; dips of none stay dips of none."""
    first = curves[0]
    alike = [c.step_time_s for c in curves if np.array_equal(c.batch_tokens, first.batch_tokens)]
    return first if len(alike) == 1 else replace(first, step_time_s=np.median(alike, axis=0))


def _alone(view: RankView, min_predicted_gain: float) -> Budget:
    return lagged_budget(view.survivals, view.times, view.num_other_tokens, min_predicted_gain)


def _named(budget: Budget, rule: str) -> Budget:
    return Budget(budget.max_draft_tokens, budget.min_survival, rule)
