"""The allocator's brain, and the policy a rank runs by itself: budgets from measured curves and lagged survivals.

Both use the same pure search. The allocator is advisory: a rank without a fresh budget asks its `LocalPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from actors.core.messages import LoadView, RankLoad, RankProfile, StepReport, VerifyBudget
from actors.core.prefix_scheduler import (
    LAG_STEPS,
    Algorithm1,
    Budget,
    Lagged,
    NoSpeculation,
    StaticLength,
    StaticThreshold,
    lagged_budget,
)
from actors.core.sps import CostCurve, RankTimes
from actors.core.verify_decision import StepFacts, VerifyChoice, VerifyPolicy

Float32 = npt.NDArray[np.float32]
PolicyName = Literal["none", "static_length", "static_threshold", "algorithm1", "lagged"]

_SMOOTHING = 0.9  # of the served averages behind the load view


# --- on the rank ----------------------------------------------------------------------------------------------------


class LocalPolicy:
    """What a rank without a fresh budget decides by: the configured policy over its own curve and survivals.

    A `verify_decision.VerifyPolicy`. The shell hands it the measured curve (`times.measured`) and every served step
    (`times.fold`); until then it is cold and verifies what is more likely accepted than not.
    """

    def __init__(
        self,
        name: PolicyName,
        static_length: int = 0,
        static_threshold: float = 0.0,
        min_predicted_gain: float = 0.0,
    ) -> None:
        self.name = name
        self.times = RankTimes()
        policies: dict[str, VerifyPolicy] = {
            "none": NoSpeculation(),
            "static_length": StaticLength(static_length),
            "static_threshold": StaticThreshold(static_threshold),
            "algorithm1": Algorithm1(self.times),
            "lagged": Lagged(self.times, min_predicted_gain),
        }
        self._policy = policies[name]

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return self._policy.choose(facts)


# --- in the allocator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankView:
    """What a budget for one rank is decided from."""

    rank: str
    survivals: Float32  # [R, gamma], at least LAG_STEPS older than the steps the budget will steer
    num_other_tokens: int
    times: RankTimes


BudgetSolver = Callable[[list[RankView], float], list[Budget]]
"""From the views of all ranks and the least gain to one budget a rank. A joint solver over groups replaces it."""


def solve_each(views: list[RankView], min_predicted_gain: float) -> list[Budget]:
    """Every rank by itself: right for ranks that do not share a step (C6, the special case of one rank)."""
    return [
        lagged_budget(view.survivals, view.times, view.num_other_tokens, min_predicted_gain)
        for view in views
    ]


@dataclass
class _Rank:
    """What the allocator knows of one incarnation of a rank."""

    epoch: str
    heard_at: float
    times: RankTimes = field(default_factory=RankTimes)
    report: StepReport | None = None
    budgeted_step: int = -1
    committed_per_round: float = 1.0


@dataclass
class Allocator:
    """Folds reports and profiles of all ranks; publishes budgets and the load view. Holds no clock: `now` is given.

    Attributes:
        policy: budgets are published for "lagged" only; every other policy is decided on the rank.
        budget_ttl_steps: steps after its first one in which a budget may still be used.
        max_report_age_s: a rank silent for longer gets no budget.
        expected_identity: refuse curves of another model, device or topology; None accepts any.
    """

    policy: PolicyName = "lagged"
    budget_ttl_steps: int = 8
    min_predicted_gain: float = 0.0
    max_report_age_s: float = 10.0
    expected_identity: str | None = None
    solver: BudgetSolver = solve_each
    num_stale_reports: int = 0
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    # Incarnations that are over (None), or were forgotten and may come back.
    _retired: dict[tuple[str, str], _Rank | None] = field(default_factory=dict)
    _version: int = 0

    def fold(self, message: StepReport | RankProfile, now: float) -> bool:
        """Take a message in. False when it was dropped: repeated, late, or of an incarnation that is over.

        Raises:
            CurveError: a profile that cannot be used (the rank's earlier curve, if any, stays).
        """
        rank = self._incarnation(message, now)
        if rank is None:
            self.num_stale_reports += 1
            return False
        if isinstance(message, RankProfile):
            rank.times.measured(CostCurve.of(message, self.expected_identity))
            rank.heard_at = now
            return True
        if rank.report is not None and message.step <= rank.report.step:
            self.num_stale_reports += 1
            return False
        rank.report, rank.heard_at = message, now
        self._learn(rank, message)
        return True

    def forget(self, rank: str) -> None:
        """The rank is gone: what it still says is late, unless `recall` finds that it was only silent."""
        known = self._ranks.pop(rank, None)
        if known is not None:
            self._retired[rank, known.epoch] = known

    def recall(self, rank: str, epoch: str) -> bool:
        """A rank is there (again). Whether it is a forgotten incarnation, which now counts as before."""
        known = self._retired.get((rank, epoch))
        if known is None or rank in self._ranks:
            return False
        self._ranks[rank] = known
        del self._retired[rank, epoch]
        return True

    def budgets(self, now: float) -> list[VerifyBudget]:
        """A budget for every rank whose newest report has none yet, from that report's survivals (C3)."""
        if self.policy != "lagged":
            return []
        ready = [
            (name, rank, rank.report)
            for name, rank in self._ranks.items()
            if rank.report is not None
            and rank.times.curve is not None
            and rank.report.step > rank.budgeted_step
            and len(rank.report.survivals)
            and now - rank.heard_at <= self.max_report_age_s
        ]
        views = [
            RankView(name, report.survivals, report.num_prefill_tokens, rank.times)
            for name, rank, report in ready
        ]
        published = []
        for (name, rank, report), budget in zip(
            ready, self.solver(views, self.min_predicted_gain), strict=True
        ):
            rank.budgeted_step = report.step
            for_step = report.step + LAG_STEPS
            published.append(
                VerifyBudget(
                    rank=name,
                    epoch=rank.epoch,
                    based_on_step=report.step,
                    for_step=for_step,
                    expires_step=for_step + self.budget_ttl_steps,
                    max_draft_tokens=budget.max_draft_tokens,
                    min_survival=budget.min_survival,
                    rule=budget.rule,
                )
            )
        return published

    def load_view(self, now: float) -> LoadView:
        """The load of every rank heard of. A rank that has not reported yet shows zero blocks: not known."""
        self._version += 1
        return LoadView(
            self._version,
            tuple(self._load(name, rank, now) for name, rank in sorted(self._ranks.items())),
        )

    def _incarnation(self, message: StepReport | RankProfile, now: float) -> _Rank | None:
        """The state of the sender's incarnation; a new epoch starts afresh, an epoch that ended is None."""
        name, epoch = message.rank.name, message.rank.epoch
        if (name, epoch) in self._retired:
            return None
        known = self._ranks.get(name)
        if known is None or known.epoch != epoch:
            if known is not None:
                self._retired[name, known.epoch] = None
            self._ranks[name] = known = _Rank(epoch, now)
        return known

    def _learn(self, rank: _Rank, report: StepReport) -> None:
        decoding = report.num_requests and not report.num_prefill_tokens
        if not decoding:
            return
        served_s = report.step_time_s + report.draft_wait_s
        rank.times.fold(
            report.num_requests, report.batch_tokens, report.num_prefill_tokens, served_s
        )
        per_round = report.num_committed / report.num_requests
        rank.committed_per_round = (
            _SMOOTHING * rank.committed_per_round + (1 - _SMOOTHING) * per_round
        )

    def _load(self, name: str, rank: _Rank, now: float) -> RankLoad:
        report = rank.report
        running = report.num_requests if report else 0
        waiting = report.num_waiting if report else 0
        return RankLoad(
            rank=name,
            num_running=running,
            num_waiting=waiting,
            num_free_blocks=report.num_free_blocks if report else 0,
            num_blocks=report.num_blocks if report else 0,
            predicted_tpot_s=self._predicted_tpot_s(rank, running, waiting),
            age_s=now - rank.heard_at,
        )

    def _predicted_tpot_s(self, rank: _Rank, running: int, waiting: int) -> float:
        """Seconds between two tokens of one more request: a round with it, over what a round commits per request.

        Requests that wait share the rank with those that run, so they lengthen everyone's share alike.
        """
        report, queued = rank.report, (running + waiting + 1) / (running + 1)
        curve = rank.times.curve
        if curve is None:
            served = report.step_time_s + report.draft_wait_s if report else 0.0
            return served / rank.committed_per_round * queued
        if report and running:
            per_request = (report.batch_tokens - report.num_prefill_tokens) / running
        else:
            per_request = 1.0 + curve.gamma
        round_s = float(rank.times.step_time_s_at(running + 1, per_request * (running + 1)))
        return round_s / rank.committed_per_round * queued
