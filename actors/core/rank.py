"""A target rank as a state machine: messages in, steps out. No clock, no I/O, no torch, no Ray.

The shell reads its sockets and the clock and runs the engine; every decision is made here:

    for message in inbox: send(rank.on_message(message, now))
    plan = rank.plan_step(now)      # None: nothing to run; see `waiting_for_proposals` and `deadline`
    result = engine.step(plan)
    send(rank.apply(plan, result, now, step_time_s))

Messages may come in while the engine works on a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.core.admission import RankLimits
from actors.core.batching import (
    build_plan,
    num_prefill_left,
    request_at,
    shape_step,
    split_prefill,
)
from actors.core.draft_choice import choose_drafting
from actors.core.layout import StepPlan, StepResult
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    Endpoint,
    Message,
    ProposalBatch,
    Reserve,
    StepReport,
    TokenDelta,
    TokenDeltas,
    VerifyBudget,
)
from actors.core.prefill_pace import PrefillPace
from actors.core.rank_calibration import RankCalibration
from actors.core.rank_counters import RankCounters
from actors.core.rank_report import idle_report, step_report
from actors.core.request import Request
from actors.core.request_book import RequestBook
from actors.core.round_decision import decide_rounds
from actors.core.row_table import Slots
from actors.core.sps import RankTimes
from actors.core.step_commit import Commit, StepInFlight, commit_step, learn_from
from actors.core.verify_decision import VerifyDecider

Outgoing = list[tuple[Endpoint, Message]]

_STEP_TIME_WEIGHT = 0.2


class UnexpectedMessageError(TypeError):
    """A message reached a target rank that is meant for another kind of process."""


class Rank:
    """Requests, KV blocks and rounds of one target rank.

    Attributes:
        allocator: gets a `StepReport` after every step; None while there is no allocator.
        waiting_for_proposals: `plan_step` returned None because blocks are on their way.
        deadline: when to call `plan_step` again at the latest, in seconds on the caller's clock; None: only a message
            can change anything.
        report: of the last step.
        landed: the last step, with what it committed.
        notes: what is worth a line in a log, of the last step.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        limits: RankLimits,
        decider: VerifyDecider,
        calibration: RankCalibration | None = None,
        times: RankTimes | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.decider = decider
        self.calibration = calibration or RankCalibration(limits.gamma)
        self.pace = PrefillPace(limits.max_step_stretch, times)
        self.counters = RankCounters(limits.gamma)
        self.book = RequestBook(endpoint, limits, self.counters, self._is_in_step)
        self.allocator: Endpoint | None = None
        self.report: StepReport | None = None
        self.landed: tuple[StepInFlight, Commit] | None = None
        self.notes: list[str] = []
        self.waiting_for_proposals = False
        self.deadline: float | None = None
        self.step_time_s = 0.0  # smoothed
        self._step = 0  # number of the next step
        self._in_flight: StepInFlight | None = None
        self._waiting_since: float | None = None

    # --- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, message: Message, now: float) -> Outgoing:
        """Take in one message; returns what must be sent because of it.

        Raises:
            UnexpectedMessageError: the message is not for a target rank.
        """
        book = self.book
        match message:
            case ProposalBatch():
                book.drafts.receive(message, book.live, now)
            case VerifyBudget():
                self.decider.budgets.offer(message, self._step)
            case Reserve():
                reply = book.reserve(message, self.step_time_s, now)
                return [(message.reply_to, reply)]
            case AdmittedRequest():
                last = book.admit(message)
                deltas = {message.reply_to: [last]} if last else {}
                return [*self._deltas(deltas), *book.drafts.flush()]
            case AbortRequest():
                ended = book.abort(message)
                deltas = {ended.admitted.reply_to: [ended.delta((), "abort")]} if ended else {}
                return [*self._deltas(deltas), *book.drafts.flush()]
            case _:
                raise UnexpectedMessageError(
                    f"rank {self.endpoint.name} got a {type(message).__name__}: it is not for a target"
                )
        return []

    def set_drafters(self, endpoints: Sequence[Endpoint]) -> None:
        """Name the drafters alive now; none means plain decoding, without waiting."""
        if self.book.drafts.set_drafters(endpoints if self.limits.gamma else ()):
            self.decider.new_drafter()
            self.calibration.restart()

    def abort_ingress(self, name: str) -> Outgoing:
        """An ingress replica has died: end its requests without a word to it."""
        self.book.abort_all_of(name)
        return self.book.drafts.flush()

    def drain(self, *, is_drained: bool = True) -> None:
        """Grant no more reservations; what was granted runs to its end. Or grant them again."""
        self.book.desk.draining = is_drained

    def give_up(self, why: str) -> Outgoing:
        """Between two steps: give all requests back to their ingresses, which go on with them elsewhere."""
        return [*self._deltas(self.book.give_up(why)), *self.book.drafts.flush()]

    # --- a step -----------------------------------------------------------------------------------------------------

    def plan_step(self, now: float) -> StepPlan | None:
        """Decide the next step, or None when there is nothing (better) to do than to wait."""
        assert self._in_flight is None, "the last step was neither applied nor failed"
        book, table, limits = self.book, self.book.table, self.limits
        book.desk.expire(now)
        book.make_room()
        book.start_waiting()
        ready = self._ready_rounds(now)
        if ready is None or not (len(ready) or book.prefilling):
            return None
        shape = shape_step(table, ready, book.prefilling, limits.max_batch_tokens, self.pace)
        rounds = shape.rounds
        decision, drafted = decide_rounds(
            self._step, table, shape, limits, self.decider, self.calibration
        )
        num_drafts = int(decision.verify_len.sum())
        left = limits.max_batch_tokens - len(rounds) - num_drafts
        wanted = min(num_prefill_left(book.prefilling), left)
        most = self.pace.most_tokens(len(rounds), num_drafts, wanted)
        chunks = split_prefill(book.prefilling, most)
        plan = build_plan(
            self._step,
            table,
            limits.block_size,
            rounds,
            decision.verify_len,
            chunks,
            token_bound=len(rounds) + decision.most_draft_tokens,
        )
        rows = [request_at(table, slot) for slot in rounds.tolist()]
        rows += [request for request, _ in chunks]
        waited_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        self._in_flight = StepInFlight(plan, tuple(rows), decision, drafted, waited_s)
        self._waiting_since = None
        self._step += 1
        self.counters.num_late += int(table.wants_draft[rounds].sum())
        self.counters.num_unasked += int(table.is_unasked[rounds].sum())
        # A block that arrives from now on is for a length that this step makes old.
        table.wants_draft[rounds] = table.has_draft[rounds] = table.is_unasked[rounds] = False
        table.last_step[rounds] = self._step
        return plan

    def _ready_rounds(self, now: float) -> Slots | None:
        """Slots that can run a round now; None: wait for blocks, nothing better can be done.

        The batch is kept together: rounds that are ready, and prefill, wait for the last block as long as it is due
        within about one step; beyond that a step without the missing rows is cheaper than standing still.
        """
        self.waiting_for_proposals, self.deadline = False, None
        running: Slots = np.flatnonzero(self.book.table.is_running)
        outlook = self.book.drafts.outlook(running, self._step, now)
        pending = outlook.pending
        if not pending.any():
            return running
        until = outlook.deadline
        if self.book.prefilling or not pending.all():
            until = min(until, outlook.expected_at + self.step_time_s)
            if outlook.expected_at - now > self.step_time_s or now >= until:
                return running[~pending]
        self.waiting_for_proposals, self.deadline = True, until
        if self._waiting_since is None:
            self._waiting_since = now
        return None

    def apply(self, plan: StepPlan, result: StepResult, now: float, step_time_s: float) -> Outgoing:
        """Commit a step: token deltas, features for the drafters, the report for the allocator."""
        flight, book = self._land(plan), self.book
        book.cache.keep(plan, result.features)
        commit = commit_step(flight, result, book.table)
        self.landed = flight, commit
        for request in flight.rows:
            book.cache.note(request)
        for request in commit.prefilled:
            book.prefilling.remove(request)
        for request in commit.ended:
            book.end(request)
        for request in commit.aborted:
            book.release(request)
        self.counters.count(flight, commit)
        self.notes = learn_from(self.calibration, flight, commit)
        self.pace.fold(plan.batch_tokens, flight.num_prefill_tokens, step_time_s)
        old_s = self.step_time_s or step_time_s
        self.step_time_s = old_s + _STEP_TIME_WEIGHT * (step_time_s - old_s)
        # Drafters first: the next step may have to wait for them.
        kept = commit.num_kept
        asked = choose_drafting(
            self._step, book.table, book.drafts.askable(flight.rows, kept), book.prefilling, self.limits,
            self.pace, self.decider, self.counters, self.calibration, flight.decision.choice,
        )  # fmt: skip
        # Of them what is over first: a preempted request may have been opened again.
        out = book.drafts.flush()
        out += book.drafts.commit_batches(plan, result.features, flight.rows, kept, asked, now)
        out += self._deltas(commit.deltas)
        self.report = step_report(self.endpoint, book, flight, commit, step_time_s)
        if self.allocator is not None:
            out.append((self.allocator, self.report))
        return out

    def fail(self, plan: StepPlan, error: str) -> Outgoing:
        """The engine could not compute the step: its requests end with an error the client sees."""
        flight = self._land(plan)
        deltas: dict[Endpoint, list[TokenDelta]] = {}
        for request in flight.rows:
            if request.finished:
                self.book.release(request)
                continue
            last = request.delta((), "error", error)
            deltas.setdefault(request.admitted.reply_to, []).append(last)
            self.book.end(request)
            self.counters.num_failed += 1
        return [*self._deltas(deltas), *self.book.drafts.flush()]

    def _land(self, plan: StepPlan) -> StepInFlight:
        flight, self._in_flight = self._in_flight, None
        assert flight is not None and flight.plan is plan, "this is not the step under way"
        return flight

    def _is_in_step(self, request: Request) -> bool:
        return self._in_flight is not None and self._in_flight.holds(request)

    # --- what others see --------------------------------------------------------------------------------------------

    def _deltas(self, deltas: dict[Endpoint, list[TokenDelta]]) -> Outgoing:
        rank = self.endpoint
        return [
            (ingress, TokenDeltas(rank.name, rank.epoch, self._step, tuple(of_ingress)))
            for ingress, of_ingress in deltas.items()
        ]

    def report_idle(self) -> Outgoing:
        """Tell once that nothing runs any more: the allocator would keep the last busy step, drafters a lost end."""
        if not self.is_idle:
            return []
        out = self.book.drafts.forget_all(self._step)
        if self.allocator is None or (self.report is not None and self.report.batch_tokens == 0):
            return out
        self.report = idle_report(self.endpoint, self.book, self._step)
        self._step += 1  # every report has its own number
        return [*out, (self.allocator, self.report)]

    @property
    def is_idle(self) -> bool:
        return not self.book.live and self._in_flight is None

    def check_idle(self) -> list[str]:
        """What is not back at its baseline although nothing runs; and always, what is wrong in the block pool."""
        problems = self.book.pool.check_integrity()
        return problems + self.book.problems() if self.is_idle else problems
