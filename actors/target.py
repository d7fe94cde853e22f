"""A target rank's shell: it owns the committed tokens and the KV of its requests, and runs their rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from actors import tracing
from actors.core.layout import StepPlan
from actors.core.lockstep import Formation
from actors.core.messages import RankProfile
from actors.core.own_profile import OwnProfile
from actors.core.rank import Rank, UnexpectedMessageError
from actors.core.rank_report import rank_stats
from actors.core.rank_view import rank_view
from actors.core.step_clock import StepClock
from actors.engine.base import TargetEngine, TargetSpec
from actors.group_member import GroupMember
from actors.link import Role
from actors.rank_start import (
    MeasureSteps,
    decider_of,
    farewells,
    gamma_of,
    measured_times,
    policy_of,
    rank_of,
    rows_are_invariant,
)
from actors.shell import Peers, Seat, Shell
from actors.tracing.rank_spans import RankSpans
from configs.change import PolicyOrder
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

IDLE_TURN_S = 1.0  # reservations that nobody used expire in the meantime
MAX_FAILURES_IN_A_ROW = 3

TargetEngineFactory = Callable[[ClusterConfig, Seat], TargetEngine]


class TargetActor(Shell):
    """One target rank.

    Args:
        seat: name, keys and threads.
        config: the cluster's configuration.
        engine_factory: loads the engine; called on the loop thread.
        measure_steps: measures the cost curve of the loaded engine.
    """

    role: Role = "target"

    def __init__(
        self,
        seat: Seat,
        config: ClusterConfig,
        engine_factory: TargetEngineFactory,
        measure_steps: MeasureSteps,
        **kwargs: Any,
    ) -> None:
        super().__init__(seat, config.link.kind, **kwargs)
        self._config = config
        self._engine_factory = engine_factory
        self._measure_steps = measure_steps
        self._engine: TargetEngine
        self._rank: Rank
        self._spans: RankSpans
        self._spec: TargetSpec | None = None
        self._policy = policy_of(config.policy)
        self._member: GroupMember | None = None  # of a group whose ranks step together
        self._profile: OwnProfile | None = None
        self._clock = StepClock()
        self._is_row_invariant: bool | None = None
        self._wait_s: float | None = 0.0
        self._is_checked = True  # since the rank last became idle
        self._num_idle_checks = self._num_idle_problems = 0
        self._num_unexpected = self._num_engine_failures = self._failures_in_a_row = 0
        self.start()

    @property
    def spec(self) -> TargetSpec | None:
        return self._spec

    @property
    def offer(self) -> str:
        return self._member.offer if self._member else ""

    @property
    def waited_s(self) -> float:
        return self._member.waited_s() if self._member else 0.0

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare(self) -> str:
        config = self._config
        self.enter("loading", config.model.path)
        with tracing.span(tracing.SPAN_LOAD, {tracing.ATTR_RANK: self.seat.name}):
            self._engine = self._engine_factory(config, self.seat)
        if config.target.group_size > 1:
            self._meet_group()
        note = self._check_rows() if config.model.numerics == "reproducible" else ""
        self.enter("measuring", "step times")
        spec, endpoint = self._engine.spec, self.link.endpoint
        measured = measured_times(self._engine, config, self._measure_steps, self._member)
        times = self._policy.times
        self._profile = OwnProfile(endpoint, spec.identity, measured, gamma_of(config), times)
        if self._profile.problem:
            self._warn(self._profile.problem)
        self._decider = decider_of(endpoint, config, self._policy)
        self._rank = rank_of(endpoint, spec, config, self._decider, self._policy)
        self._spec = spec
        self._spans = RankSpans(endpoint.name, tracing.tracer())
        return note

    def _meet_group(self) -> None:
        self._member = GroupMember(self._engine, self._config, self.host, self._fail)
        self.enter("forming", f"group of {self._config.target.group_size}")
        self._member.meet(self._stopping.is_set)

    def _check_rows(self) -> str:
        self.enter("measuring", "row invariance")
        self._is_row_invariant = rows_are_invariant(self._engine, self._member)
        if self._is_row_invariant:
            return "(a row's result does not depend on its batch)"
        note = (
            "WARNING: numerics=reproducible, but a row's result depends on its batch here; the same "
            "seed may give other tokens. Use dtype=float32 or numerics=fast"
        )
        self._warn(note.removeprefix("WARNING: "))
        return note

    def _warn(self, problem: str) -> None:
        """Say it in the log, and in /health for as long as this incarnation lives."""
        log.error("%s: %s", self.seat.name, problem)
        self.warning = "; ".join(filter(None, (self.warning, problem)))

    # --- a turn -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        rank = self._rank
        for message in self.link.poll(self._wait_s):
            try:
                self.send_all(rank.on_message(message, time.monotonic()))
            except UnexpectedMessageError as error:
                self._num_unexpected += 1
                log.warning("%s", error)
            self._spans.receive(message)
        for peer in self.link.lost():
            if peer.role == "ingress":
                log.warning("%s: %s is gone, its requests end", self.seat.name, peer.name)
                self.send_all(rank.abort_ingress(peer.name))
        self._spans.end_gone(rank.book.live)
        now = time.monotonic()
        is_closed = self._member is not None and self._member.is_closed
        plan = None if is_closed else rank.plan_step(now)
        if plan is not None:
            self._wait_s = 0.0
            self._is_checked = False
            self._step(plan)
        elif rank.waiting_for_proposals and rank.deadline is not None:
            self._wait_s = max(0.0, rank.deadline - now)
            if self._member:
                self._wait_s = self._member.hold(now, rank.deadline, rank.step_time_s)
        else:
            self._wait_s = IDLE_TURN_S
            self._rest()
            if self._member:
                self._wait_s = self._member.idle()

    def _step(self, plan: StepPlan) -> None:
        rank = self._rank
        started, started_ns = time.perf_counter(), time.time_ns()
        try:
            result = self._engine.step(plan)
        except Exception as error:
            if self._member:  # the group is broken, not the step: its streams go on elsewhere
                raise
            self._num_engine_failures += 1
            self._failures_in_a_row += 1
            log.exception("%s: step %d failed", self.seat.name, plan.step)
            self.send_all(rank.fail(plan, f"the target could not compute a step: {error}"))
            self._spans.end_gone(rank.book.live, "error")
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise
            return
        self._failures_in_a_row = 0
        if self._member:
            self._member.stepped()
        outgoing = rank.apply(plan, result, time.monotonic(), time.perf_counter() - started)
        for note in rank.notes:
            log.warning("%s: %s", self.seat.name, note)
        landed, report = rank.landed, rank.report
        assert landed is not None and report is not None
        outgoing = self._spans.landed(*landed, outgoing, started_ns, time.time_ns())
        # The next step waits for the drafters: their messages leave first.
        self.send_all(sorted(outgoing, key=lambda sent: sent[0].role != "drafter"))
        self._clock.note(report, self._policy.times)
        self._policy.times.fold_report(report)

    def _rest(self) -> None:
        """Nothing runs: say so once, and check that everything is back at its baseline."""
        rank = self._rank
        if not rank.is_idle:
            return
        self.send_all(rank.report_idle())
        if self._is_checked:
            return
        self._is_checked = True
        self._num_idle_checks += 1
        self.integrity_problems = tuple(rank.check_idle())
        self._num_idle_problems += len(self.integrity_problems)
        for problem in self.integrity_problems:
            log.error("%s: integrity: %s", self.seat.name, problem)

    def meet(self, old: Peers, new: Peers) -> None:
        rank = self._rank
        usable = [d for d in new.drafters if d.spec.gamma == rank.limits.gamma]
        for drafter in set(new.drafters) - set(usable):
            sizes = drafter.spec.gamma, rank.limits.gamma
            text = "%s offers blocks of gamma=%d, not %d: it is not used by %s"
            log.error(text, drafter.endpoint.name, *sizes, self.seat.name)
        if new.order is not None and new.order != old.order:
            self._adopt(new.order)
        endpoints = [d.endpoint for d in usable if self._config.policy.name != "none"]
        self.send_all(farewells(rank, [d.endpoint for d in old.drafters], endpoints))
        rank.set_drafters(endpoints)
        rank.allocator = new.allocator
        drafting_changed = old.drafters != new.drafters
        if drafting_changed and usable and self._profile is not None:
            self._profile.take_draft_times(usable[0].draft_times)
        if new.allocator is not None and (drafting_changed or old.allocator != new.allocator):
            self._introduce()

    def _adopt(self, order: PolicyOrder) -> None:
        """Between two steps, and known to nobody's drafts: the next step is decided by the new policy (C3)."""
        self._config = self._config.model_copy(update={"policy": order.policy})
        self._policy = policy_of(order.policy, self._policy.times)
        self._decider.adopt(order.number, self._policy, self._policy.drafting)
        self._rank.calibration.follow(order.policy.name)
        log.info("%s: policy %s", self.seat.name, order.policy.name)

    def _introduce(self) -> None:
        """A new allocator knows nothing; it gets the curve and the last report."""
        rank = self._rank
        assert rank.allocator is not None and self._profile is not None
        self.link.send(rank.allocator, self._profile.message)
        self.send_all([(rank.allocator, rank.report)] if rank.report else rank.report_idle())

    # --- control ----------------------------------------------------------------------------------------------------

    def tear_down(self) -> None:
        self._spans.end_gone(())
        if self._member:
            self._member.leave()

    async def form(self, formation: Formation) -> None:
        """The supervisor has all ranks of the group together."""
        if self._member:
            self._member.receive(formation)

    async def drain(self) -> None:
        """Grant no more reservations; what was granted runs to its end."""
        await self.on_loop(self._rank.drain)
        self.enter("draining")

    async def profile(self) -> RankProfile | None:
        """The measured cost curve."""
        return self._profile.message if self._profile else None

    async def explain(self, response_id: str) -> dict[str, Any]:
        """Why the rounds of a response were verified as far as they were (C11); see `core.explain.explanation`."""
        return await self.on_loop(lambda: self._rank.book.explain(response_id))

    async def stats(self) -> dict[str, Any]:
        """Counts since this incarnation started, and the verdict of the last idle check."""
        return await self.on_loop(self._stats)

    def _stats(self) -> dict[str, Any]:
        rank, step_s = self._rank, self._clock.step_s
        return {
            **rank_stats(rank),
            **rank_view(rank.counters, self._clock, self._policy.times, rank.landed),
            "step_s": step_s,
            **self._decider.cost(step_s),
            "policy": self._policy.name,
            "is_row_invariant": self._is_row_invariant,
            "num_idle_checks": self._num_idle_checks,
            "num_idle_problems": self._num_idle_problems,
            "idle_problems": list(self.integrity_problems),
            "num_unexpected": self._num_unexpected,
            "num_engine_failures": self._num_engine_failures,
            "group": self._member.stats() if self._member else None,
            "link": asdict(self.link.counters),
        }
