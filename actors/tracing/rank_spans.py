"""The spans of a rank's traced requests: queue, prefill chunks, rounds. The shell tells what came and what ran."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from opentelemetry.trace import Span, Tracer

from actors import tracing
from actors.core.messages import AdmittedRequest, CommitBatch, Endpoint, Message, ProposalBatch
from actors.core.request import Request
from actors.core.step_commit import Commit, StepInFlight

MAX_TRACED_ROUNDS = 256  # of one request; the others are counted

Outgoing = list[tuple[Endpoint, Message]]


@dataclass
class _Traced:
    """What is open of one request."""

    generation: int
    tracer: Tracer
    whole: Span
    queue: Span | None
    round: Span | None = None
    asked_len: int = 0  # committed length the open round asked a block for
    num_rounds: int = 0


class RankSpans:
    """Holds the open spans of the requests that are traced; all others cost a look into an empty dictionary.

    Times are nanoseconds since 1970. Without a tracer nothing is traced.
    """

    def __init__(self, rank: str, tracer: Tracer | None) -> None:
        self._rank = rank
        self._tracer = tracer
        self._open: dict[str, _Traced] = {}

    def receive(self, message: Message) -> None:
        """A message has come, and the rank has dealt with it."""
        if self._tracer is None:
            return
        match message:
            case AdmittedRequest() if tracing.is_sampled(message.traceparent):
                self._begin(message, self._tracer)
            case ProposalBatch() if self._open:
                self._note_proposals(message)

    def landed(
        self, flight: StepInFlight, commit: Commit, outgoing: Outgoing, start_ns: int, end_ns: int
    ) -> Outgoing:
        """A step ran and was committed. Returns what is sent because of it, with the traces drafters go on with."""
        if not self._open:
            return outgoing
        for row, request in enumerate(flight.rows):
            traced = self._find(request.request_id, request.generation)
            if traced is None:
                continue
            if traced.queue is not None:
                traced.queue.end(start_ns)
                traced.queue = None
            if row < flight.num_rounds:
                self._end_round(traced, flight, commit, row, start_ns, end_ns)
            else:
                self._note_chunk(traced, flight, row, start_ns, end_ns)
            if request.finished:
                self._end(request.request_id, _reason(request, commit), request, end_ns)
        return [(to, self._hand_on(message, end_ns)) for to, message in outgoing]

    def end_gone(self, live: Container[str], reason: str = "abort") -> None:
        """Requests that left between two steps."""
        for request_id in [r for r in self._open if r not in live]:
            self._end(request_id, reason, None, None)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _begin(self, message: AdmittedRequest, tracer: Tracer) -> None:
        known = self._open.get(message.request_id)
        if known is not None and known.generation >= message.generation:
            return  # the same admission, repeated
        if known is not None:
            self._end(message.request_id, "replaced", None, None)
        attributes: dict[str, str | int] = {
            tracing.ATTR_REQUEST_ID: message.request_id,
            tracing.ATTR_GENERATION: message.generation,
            tracing.ATTR_RANK: self._rank,
            tracing.ATTR_CONTEXT_LEN: len(message.prompt_ids),
        }
        whole = tracer.start_span(
            tracing.SPAN_GENERATE, tracing.context_of(message.traceparent), attributes=attributes
        )
        queue = tracer.start_span(tracing.SPAN_QUEUE, tracing.below(whole))
        self._open[message.request_id] = _Traced(message.generation, tracer, whole, queue)

    def _find(self, request_id: str, generation: int) -> _Traced | None:
        traced = self._open.get(request_id)
        return traced if traced is not None and traced.generation == generation else None

    def _hand_on(self, message: Message, now_ns: int) -> Message:
        """A round begins where its block is asked for; the drafter's span hangs below it."""
        if not isinstance(message, CommitBatch):
            return message
        parents: list[tuple[str, str]] = []
        for row, request_id in enumerate(message.request_ids):
            traced = self._find(request_id, int(message.generations[row]))
            if traced is not None and message.wants_block[row]:
                traced.round = self._begin_round(traced, now_ns)
                traced.asked_len = int(message.committed_lens[row])
                if traced.round is not None:
                    parents.append((request_id, tracing.traceparent_of(traced.round)))
        return replace(message, traceparents=tuple(parents)) if parents else message

    def _begin_round(self, traced: _Traced, now_ns: int) -> Span | None:
        if traced.num_rounds >= MAX_TRACED_ROUNDS:
            return None
        return traced.tracer.start_span(
            tracing.SPAN_ROUND, tracing.below(traced.whole), start_time=now_ns
        )

    def _note_proposals(self, message: ProposalBatch) -> None:
        for row, request_id in enumerate(message.request_ids):
            traced = self._find(request_id, int(message.generations[row]))
            if traced is None or traced.round is None:
                continue
            # A late block is of a round that is over.
            if traced.asked_len == message.committed_lens[row]:
                attributes = {tracing.ATTR_DRAFTER: message.drafter}
                traced.round.add_event(tracing.EVENT_PROPOSAL, attributes)

    def _note_chunk(
        self, traced: _Traced, flight: StepInFlight, row: int, start_ns: int, end_ns: int
    ) -> None:
        if (
            traced.round is not None
        ):  # it was preempted while it waited for a block: that round never ran
            traced.round.add_event(tracing.EVENT_PREEMPTED, timestamp=start_ns)
            traced.round.end(start_ns)
            traced.round = None
        plan = flight.plan
        first, end = plan.cu_query_len[row : row + 2].tolist()
        attributes = {
            tracing.ATTR_STEP: plan.step,
            tracing.ATTR_NUM_TOKENS: end - first,
            tracing.ATTR_CONTEXT_LEN: int(plan.context_len[row]),
            tracing.ATTR_BATCH_TOKENS: plan.batch_tokens,
        }
        traced.tracer.start_span(
            tracing.SPAN_PREFILL,
            tracing.below(traced.whole),
            attributes=attributes,
            start_time=start_ns,
        ).end(end_ns)

    def _end_round(
        self,
        traced: _Traced,
        flight: StepInFlight,
        commit: Commit,
        row: int,
        start_ns: int,
        end_ns: int,
    ) -> None:
        span = traced.round or self._begin_round(traced, start_ns)
        traced.round = None
        traced.num_rounds += 1
        if span is None:
            return
        plan, decision = flight.plan, flight.decision
        budget: dict[str, str | int | float] = {
            tracing.ATTR_BUDGET: decision.choice.max_draft_tokens,
            tracing.ATTR_PRICE: decision.choice.min_survival,
            tracing.ATTR_RULE: decision.choice.rule,
        }
        span.add_event(tracing.EVENT_BUDGET, budget, start_ns)
        step: dict[str, int] = {
            tracing.ATTR_STEP: plan.step,
            tracing.ATTR_NUM_REQUESTS: plan.num_requests,
            tracing.ATTR_BATCH_TOKENS: plan.batch_tokens,
        }
        traced.tracer.start_span(
            tracing.SPAN_VERIFY, tracing.below(span), attributes=step, start_time=start_ns
        ).end(end_ns)
        span.set_attributes(
            {
                tracing.ATTR_NUM_PROPOSED: int(decision.proposed_len[row]),
                tracing.ATTR_SURVIVALS: [float(a) for a in decision.survivals[row]],
                tracing.ATTR_VERIFY_LEN: int(decision.verify_len[row]),
                tracing.ATTR_CUT_BY: decision.cut_by(row),
                tracing.ATTR_NUM_ACCEPTED: int(commit.num_accepted[row]),
            }
        )
        span.add_event(
            tracing.EVENT_COMMIT,
            {tracing.ATTR_NUM_TOKENS: int(commit.num_accepted[row]) + 1},
            end_ns,
        )
        span.end(end_ns)

    def _end(
        self, request_id: str, reason: str, request: Request | None, end_ns: int | None
    ) -> None:
        traced = self._open.pop(request_id)
        for part in (traced.queue, traced.round):
            if part is not None:
                part.end(end_ns)
        attributes: dict[str, str | int] = {
            tracing.ATTR_FINISH_REASON: reason,
            tracing.ATTR_NUM_ROUNDS: traced.num_rounds,
            tracing.ATTR_NUM_UNTRACED_ROUNDS: max(0, traced.num_rounds - MAX_TRACED_ROUNDS),
        }
        if request is not None:
            attributes[tracing.ATTR_NUM_TOKENS] = request.num_output
            attributes[tracing.ATTR_NUM_ACCEPTED] = request.num_accepted
        traced.whole.set_attributes(attributes)
        traced.whole.end(end_ns)


def _reason(request: Request, commit: Commit) -> str:
    for delta in commit.deltas.get(request.admitted.reply_to, ()):
        if delta.request_id == request.request_id and delta.finish_reason is not None:
            return delta.finish_reason
    return "abort"
