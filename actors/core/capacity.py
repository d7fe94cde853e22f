"""The allocator's brain: budgets from measured curves and lagged survivals, for all ranks of a cluster.

Advisory: a rank without a fresh budget decides by its own `local_policy.LocalPolicy`, which runs the same search.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.core.budget_solver import BudgetSolver, EachAlone, RankView
from actors.core.local_policy import PolicyName
from actors.core.messages import LoadView, RankLoad, RankProfile, StepReport, VerifyBudget
from actors.core.prediction import is_fallback
from actors.core.prefix_scheduler import LAG_STEPS, Budget
from actors.core.sps import CostCurve, CurveError, RankTimes

_SMOOTHING = 0.9  # of the served averages behind the load view
_KEPT_RECORDS = 4096
# What a plan may say of itself. Any other rule is a fallback: the plan asked for could not be made.
PLANNED = frozenset({"joint", "uniform", "none", "explore", "lagged", "low_gain", "idle"})


@dataclass(frozen=True)
class BudgetRecord:
    """A budget that was published, and the report it was made from: how budgets follow load can be read off these."""

    number: int  # rises by one
    at: float  # seconds on the caller's clock
    num_requests: int
    budget_used: int  # draft tokens verified in the step reported
    num_committed: int
    step_time_s: float
    budget: VerifyBudget


@dataclass
class _Rank:
    """What the allocator knows of one incarnation of a rank."""

    epoch: str
    heard_at: float
    times: RankTimes = field(default_factory=RankTimes)
    report: StepReport | None = None
    budgeted_step: int = -1
    budget: VerifyBudget | None = None  # the newest
    num_fallback_steps: int = 0
    committed_per_round: float = 1.0


@dataclass
class Allocator:
    """Folds reports and profiles of all ranks; publishes budgets and the load view. Holds no clock: `now` is given.

    Attributes:
        policy: budgets are published for "lagged" and "joint"; every other policy is decided on the rank.
        budget_ttl_steps: steps after its first one in which a budget may still be used.
        policy_number: of the policy in force, carried by its budgets; ranks under another one refuse them.
        max_report_age_s: a rank silent for longer gets no budget.
        expected_identity: refuse curves of another model, device or topology; None accepts any.
        num_by_rule, records: budgets published, by the rule behind them; and the last of them, oldest first.
    """

    policy: PolicyName = "lagged"
    budget_ttl_steps: int = 8
    min_predicted_gain: float = 0.0
    policy_number: int = 0
    max_report_age_s: float = 10.0
    expected_identity: str | None = None
    solver: BudgetSolver = field(default_factory=EachAlone)
    num_stale_reports: int = 0
    num_refused_curves: int = 0
    num_by_rule: Counter[str] = field(default_factory=Counter)
    records: deque[BudgetRecord] = field(default_factory=lambda: deque(maxlen=_KEPT_RECORDS))
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
            self._take_curve(rank, message)
            rank.heard_at = now
            return True
        if rank.report is not None and message.step <= rank.report.step:
            self.num_stale_reports += 1
            return False
        rank.report, rank.heard_at = message, now
        rank.num_fallback_steps += is_fallback(message.budget_rule)
        self._learn(rank, message, self.solver.observe(message))
        return True

    def adopt(
        self,
        number: int,
        policy: PolicyName,
        budget_ttl_steps: int,
        min_predicted_gain: float,
        solver: BudgetSolver,
    ) -> None:
        """Plan by another policy from now on. Curves and reports stay: they say what was seen, not what was decided."""
        self.policy_number, self.policy = number, policy
        self.budget_ttl_steps, self.min_predicted_gain = budget_ttl_steps, min_predicted_gain
        self.solver = solver

    def _take_curve(self, rank: _Rank, profile: RankProfile) -> None:
        try:
            curve = CostCurve.of(profile, self.expected_identity)
        except CurveError:
            self.num_refused_curves += 1
            raise
        self.num_refused_curves += curve.is_flat
        rank.times.measured(curve)

    def forget(self, rank: str) -> None:
        """The rank is gone: what it still says is late, unless `recall` finds that it was only silent."""
        known = self._ranks.pop(rank, None)
        if known is not None:
            self._retired[rank, known.epoch] = known
            self.solver.forget(rank)

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
        if self.policy not in ("lagged", "joint"):
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
        budgets = self.solver(views, self.min_predicted_gain)
        for _, rank, report in ready:
            rank.budgeted_step = report.step
        # Without a block in the step (drafting is paused) there was nothing to plan, and what was planned when there
        # was must not be replaced by "nothing": the first blocks after the pause would go unverified.
        return [
            self._publish(name, rank, report, budget, now)
            for (name, rank, report), budget in zip(ready, budgets, strict=True)
            if report.survivals.any()
        ]

    def _publish(
        self, name: str, rank: _Rank, report: StepReport, budget: Budget, now: float
    ) -> VerifyBudget:
        for_step = report.step + LAG_STEPS
        published = VerifyBudget(
            rank=name,
            epoch=rank.epoch,
            based_on_step=report.step,
            for_step=for_step,
            expires_step=for_step + self.budget_ttl_steps,
            max_draft_tokens=budget.max_draft_tokens,
            min_survival=budget.min_survival,
            rule=budget.rule,
            class_weights=budget.class_weights,
            policy_number=self.policy_number,
        )
        rank.budget = published
        counts = (report.num_requests, report.budget_used, report.num_committed)
        number = self.num_by_rule.total()
        self.records.append(BudgetRecord(number, now, *counts, report.step_time_s, published))
        self.num_by_rule[budget.rule] += 1
        return published

    @property
    def num_fallbacks(self) -> int:
        """Budgets whose rule says that the policy's own plan could not be made."""
        return sum(count for rule, count in self.num_by_rule.items() if rule not in PLANNED)

    def load_view(self, now: float) -> LoadView:
        """The load of every rank heard of. A rank that has not reported yet shows zero blocks: not known."""
        self._version += 1
        return LoadView(
            self._version,
            tuple(self._load(name, rank, now) for name, rank in sorted(self._ranks.items())),
            self.num_refused_curves,
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
                self.solver.forget(name)
            self._ranks[name] = known = _Rank(epoch, now)
        return known

    @staticmethod
    def _learn(rank: _Rank, report: StepReport, is_own_time: bool) -> None:
        """The time of a group must not correct a rank's own curve, by which it plans when left alone."""
        if report.num_prefill_tokens or not report.num_requests:
            return
        if is_own_time:
            rank.times.fold_report(report)
        per_round = report.num_committed / report.num_requests
        rank.committed_per_round = (
            _SMOOTHING * rank.committed_per_round + (1 - _SMOOTHING) * per_round
        )

    def _load(self, name: str, rank: _Rank, now: float) -> RankLoad:
        report = rank.report
        of_group = self.solver.prediction_error(name)
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
            budget=rank.budget,
            prediction_error=rank.times.error.value if of_group is None else of_group,
            num_fallback_steps=rank.num_fallback_steps,
        )

    def _predicted_tpot_s(self, rank: _Rank, running: int, waiting: int) -> float:
        """Seconds between two tokens of one more request: a round with it, over what a round commits per request.

        A rank that asks no blocks for its requests (drafting is paused) asks none for one more. Requests that wait
        share the rank with those that run, so they lengthen everyone's share alike; what `max_running` has no place for
        waits.
        """
        most = rank.report.max_running if rank.report else 0
        together = min(running + 1, most or running + 1)
        return self._tpot_s(rank, together) * (running + waiting + 1) / together

    @staticmethod
    def _tpot_s(rank: _Rank, num_requests: int) -> float:
        """The same where `num_requests` run and each asks as much as those that run now."""
        report, curve = rank.report, rank.times.curve
        if curve is None:
            served = report.step_time_s + report.draft_wait_s if report else 0.0
            return served / rank.committed_per_round
        per_request, drafted = 1.0 + curve.gamma, 1.0
        if report and report.num_requests:
            per_request = (report.batch_tokens - report.num_prefill_tokens) / report.num_requests
            drafted = int(report.num_proposed.max(initial=0)) / report.num_requests
        num_drafting = round(drafted * num_requests)
        round_s = float(rank.times.round_time_s_at(per_request * num_requests, num_drafting))
        return round_s / rank.committed_per_round

    def foretell(
        self, units: Sequence[tuple[str, ...]]
    ) -> list[tuple[int, float | None, float | None]]:
        """Of each unit (a rank, or a group): its streams, and the seconds between two tokens of one more of them:
        now, and if one unit fewer carried the streams of all. None: there is no curve to tell by."""
        loads = [[self._load(n, r, 0.0) for n in u if (r := self._ranks.get(n))] for u in units]
        counts = [sum(load.num_running + load.num_waiting for load in of_unit) for of_unit in loads]
        told: list[tuple[int, float | None, float | None]] = []
        for unit, of_unit, count in zip(units, loads, counts, strict=True):
            ranks = [self._ranks[load.rank] for load in of_unit]
            if len(ranks) < len(unit) or any(rank.times.curve is None for rank in ranks):
                told.append((count, None, None))
                continue
            now_s = max(load.predicted_tpot_s for load in of_unit)
            fewer_s = None
            if len(units) > 1:
                a_rank = math.ceil(sum(counts) / (len(units) - 1) / len(unit))
                fewer_s = max(self._predicted_tpot_s(rank, a_rank, 0) for rank in ranks)
            told.append((count, now_s, fewer_s))
        return told
