"""What the allocator knows of the ranks of one group: their newest reports, their curves, and a model of their step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import is_

import numpy as np
import numpy.typing as npt

from actors.core.budget_solver import RankView
from actors.core.cost import LockstepModel, RankStep
from actors.core.group_times import drafting_s, shared_of
from actors.core.joint import JointPlan
from actors.core.messages import StepReport
from actors.core.sps import CostCurve

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass
class RankGroup:
    """What is known of one group: its model, and the newest report and view of each of its ranks."""

    ranks: tuple[str, ...]
    model: LockstepModel
    reports: dict[str, StepReport] = field(default_factory=dict)
    views: dict[str, RankView] = field(default_factory=dict)
    newest_step: int = -1
    reported: set[str] = field(default_factory=set)  # ranks with news since the last complete step
    learned_step: int = -1
    num_plans: int = 0
    plan: JointPlan | None = None
    _measured: list[CostCurve | None] = field(default_factory=list)
    _shared_curves: list[CostCurve] = field(default_factory=list)

    def curves(self) -> list[CostCurve]:
        """The curve of every rank; empty while none is known. A rank that never ran is taken to be like the first.

        Ranks of one identity share the median of their curves, and keep how much slower each was measured as the
        first guess of its own factor: a thousand ranks of one kind are then one curve. Where all tell what they do for
        their own tokens, that is their curve, and the model is told what the group does beside it.
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
        whole = [known.get(rank) or first for rank in self.ranks]
        parts = [part for curve in whole if (part := curve.own) is not None]
        is_told = len(parts) == len(whole) > 1
        # Told apart, drafting counts once for all of them: what the slowest drafter takes.
        own = _drafting_alike(parts) if is_told else whole
        kinds: dict[str, list[CostCurve]] = {}
        for curve in own:
            kinds.setdefault(curve.identity, []).append(curve)
        typical = {identity: _typical(curves) for identity, curves in kinds.items()}
        slower = [
            np.median(curve.step_time_s / typical[curve.identity].verify_time_s(curve.batch_tokens))
            for curve in own
        ]
        if len(own) > 1:
            self.model.measured(np.array(slower), shared_of(whole) if is_told else None)
        return [typical[curve.identity] for curve in own]

    def survivals(self, rank: str) -> Float32:
        """The last a rank showed; none when it is idle now or never ran."""
        view, report = self.views.get(rank), self.reports.get(rank)
        shown = next(iter(self.views.values())).survivals if view is None else view.survivals
        idle = view is None or (report is not None and not report.num_requests)
        return shown[:0] if idle else shown

    def class_ids(self, rank: str, num_rows: int) -> Int64:
        """[num_rows] class of each row of `survivals(rank)`."""
        report = self.reports.get(rank)
        ids = None if report is None else report.class_ids
        return np.zeros(num_rows, np.int64) if ids is None else ids[:num_rows].astype(np.int64)

    def last_step(self, rank: str, curve: CostCurve) -> RankStep:
        """What the rank brought to the newest step it has reported; a rank that has not is idle."""
        report = self.reports.get(rank)
        if report is None:
            return RankStep(curve, 0, 0)
        return RankStep(curve, num_blocks(report), report.batch_tokens, report.context_tokens)

    def own_time_s(self, rank: str) -> float:
        """What the rank did for its own tokens in the newest step it has reported; 0 when that is unknown."""
        report = self.reports.get(rank)
        if report is None or report.shared_time_s is None:
            return 0.0
        return report.step_time_s - report.shared_time_s

    def note(self, report: StepReport) -> None:
        """Keep a report. The steps of another incarnation of its rank are numbered from the beginning."""
        name = report.rank.name
        known = self.reports.get(name)
        if known is not None and known.rank.epoch != report.rank.epoch:
            self.forget(name)
        self.reports[name] = report

    def forget(self, rank: str) -> None:
        self.reports.pop(rank, None)
        self.views.pop(rank, None)
        self.newest_step = self.learned_step = -1
        self.reported = set()

    def completed(self, report: StepReport) -> bool:
        """Whether all ranks of a group that steps together have reported this step, for the first time."""
        if report.step > self.newest_step:
            self.newest_step, self.reported = report.step, set()
        if report.step == self.newest_step:
            self.reported.add(report.rank.name)
        if len(self.reported) < len(self.ranks) or self.newest_step <= self.learned_step:
            return False
        self.learned_step = self.newest_step
        return True

    def is_renewed(self, report: StepReport) -> bool:
        """Whether every rank that runs anything has reported since the last time this was so."""
        self.reported.add(report.rank.name)
        busy = {name for name, latest in self.reports.items() if latest.batch_tokens}
        if not busy <= self.reported:
            return False
        self.reported = set()
        return True


def num_blocks(report: StepReport) -> int:
    """Requests a rank drafted for in a step."""
    return int(report.num_proposed.max(initial=0))


def _drafting_alike(curves: list[CostCurve]) -> list[CostCurve]:
    """The curves, each with the longest drafting of all."""
    requests = curves[0].draft_requests
    longest = np.max([drafting_s(curve, requests) for curve in curves], axis=0)
    return [replace(c, draft_requests=requests, draft_time_s=longest) for c in curves]


def _typical(curves: list[CostCurve]) -> CostCurve:
    """The median of curves measured at the same points as the first; dips of none stay dips of none."""
    first = curves[0]
    alike = [c.step_time_s for c in curves if np.array_equal(c.batch_tokens, first.batch_tokens)]
    return first if len(alike) == 1 else replace(first, step_time_s=np.median(alike, axis=0))
