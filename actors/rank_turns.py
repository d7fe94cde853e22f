"""The turns of a target rank: messages in, one step, messages out; before all others the proof that it serves."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

from actors.core.idle_checks import IdleChecks
from actors.core.layout import StepPlan
from actors.core.local_policy import LocalPolicy
from actors.core.messages import Endpoint, Message
from actors.core.proof import proof_request, require_token
from actors.core.rank import Rank, UnexpectedMessageError
from actors.core.step_clock import StepClock
from actors.engine.base import TargetEngine
from actors.group_member import GroupMember
from actors.link import Role
from actors.peers import Seat
from actors.shell import Shell
from actors.tracing.rank_spans import RankSpans

log = logging.getLogger(__name__)

IDLE_TURN_S = 1.0  # reservations that nobody used expire in the meantime
MAX_FAILURES_IN_A_ROW = 3


class RankTurns(Shell):
    """What a rank does over and over. Its engine, state machine and spans are made before the first turn."""

    role: Role = "target"
    _engine: TargetEngine
    _rank: Rank
    _spans: RankSpans

    def __init__(
        self, seat: Seat, link_kind: Literal["zmq", "actor"], policy: LocalPolicy, **kwargs: Any
    ) -> None:
        super().__init__(seat, link_kind, **kwargs)
        self._policy = policy
        self._member: GroupMember | None = None  # of a group whose ranks step together
        self._clock = StepClock()
        self._wait_s: float | None = 0.0
        self._idle = IdleChecks()
        self._note = ""  # to be said when it is ready
        self._num_unexpected = self._num_engine_failures = self._failures_in_a_row = 0

    def begin(self, note: str) -> None:
        """Ready is who has served a token."""
        self._note = note
        self.enter("proving", "a first token")
        self.send_all(self._rank.on_message(proof_request(self.link.endpoint), time.monotonic()))

    def send_all(self, outgoing: list[tuple[Endpoint, Message]]) -> None:
        others = [sent for sent in outgoing if sent[0].name != self.seat.name]
        super().send_all(others)
        for _, answer in (sent for sent in outgoing if sent[0].name == self.seat.name):
            require_token(answer)
            self._rank.counters.forget()
            self.enter("ready", self._note)

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
            self._idle.note_step()
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
        if not self._rank.is_idle:
            return
        self.send_all(self._rank.report_idle())
        for problem in self._idle.look(self._rank):
            log.error("%s: integrity: %s", self.seat.name, problem)
        self.integrity_problems = self._idle.problems
