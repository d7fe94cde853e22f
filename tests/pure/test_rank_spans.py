"""Spans of a rank's traced requests: complete however a request ends, and none of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actors.core.messages import AbortRequest, AdmittedRequest, CommitBatch, Message, ProposalBatch
from actors.core.rank import Outgoing
from actors.tracing import rank_spans
from actors.tracing.rank_spans import RankSpans
from tests.pure.rank_harness import Session, admitted, make_rank

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
NS = 10**9


class TracedSession(Session):
    """A session whose rank has spans, as the shell would keep them."""

    def __init__(self, tracer: Any, **more: Any) -> None:
        super().__init__(make_rank(max_batch_tokens=8), **more)
        self.spans = RankSpans("target-0", tracer)
        self.commits: list[CommitBatch] = []
        unspanned = self.rank.on_message

        def on_message(message: Message, now: float) -> Outgoing:
            out = unspanned(message, now)
            self.spans.receive(message)
            return out

        self.rank.on_message = on_message  # type: ignore[method-assign]
        self.proposals: list[ProposalBatch] = []
        draft = self.drafter.advance

        def advance(batch: CommitBatch) -> ProposalBatch | None:
            made = draft(batch)
            self.proposals += [made] if made is not None else []
            return made

        self.drafter.advance = advance

    def step(self, drafts: bool = True) -> Any:
        self.spans.end_gone(self.rank.book.live)
        plan = self.rank.plan_step(self.now)
        if plan is None:
            return None
        start_ns = int(self.now * NS) + NS
        out = self.rank.apply(plan, self.target.step(plan), self.now, 0.01)
        assert self.rank.landed is not None
        self.now += 0.01
        out = self.spans.landed(*self.rank.landed, out, start_ns, int(self.now * NS) + NS)
        self.commits += [message for _, message in out if isinstance(message, CommitBatch)]
        self.deliver(out, drafts)
        return plan


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def session(exporter: InMemorySpanExporter) -> Iterator[TracedSession]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield TracedSession(provider.get_tracer("test"))
    provider.shutdown()


def traced(request_id: str = "r", num_tokens: int = 12) -> AdmittedRequest:
    return replace(admitted(request_id, list(range(1, 21)), num_tokens), traceparent=SAMPLED)


def named(exporter: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_a_request_has_its_queue_chunks_rounds_and_their_parts(session, exporter):
    session.submit(traced())
    session.submit(admitted("other", [1, 2], 12))
    session.run()
    (whole,) = named(exporter, "dspark.generate")
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert whole.attributes["dspark.finish_reason"] == "length"
    assert len(named(exporter, "dspark.queue")) == 1
    assert sum(c.attributes["dspark.num_tokens"] for c in named(exporter, "dspark.prefill")) == 20
    rounds = named(exporter, "dspark.round")
    assert len(rounds) == whole.attributes["dspark.num_rounds"] > 1
    assert len(named(exporter, "dspark.verify")) == len(rounds)
    committed = sum(r.attributes["dspark.num_accepted"] + 1 for r in rounds)
    assert committed >= 11 and whole.attributes["dspark.num_tokens"] == 12
    assert any("dspark.proposal" in [e.name for e in r.events] for r in rounds)


def test_only_traced_rounds_that_want_a_block_ride_to_the_drafter(session):
    session.submit(traced())
    session.submit(admitted("other", [1, 2], 12))
    session.run()
    for commit in session.commits:
        wanting = {
            r for r, wants in zip(commit.request_ids, commit.wants_block, strict=True) if wants
        }
        assert {request_id for request_id, _ in commit.traceparents} == wanting & {"r"}
        assert all(parent.startswith(f"00-{TRACE}-") for _, parent in commit.traceparents)


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_an_abort_ends_every_open_span(session, exporter, num_steps):
    session.submit(traced(num_tokens=60))
    for _ in range(num_steps):
        session.step()
    session.rank.on_message(AbortRequest("r", 0), session.now)
    session.spans.end_gone(session.rank.book.live)
    (whole,) = named(exporter, "dspark.generate")
    assert whole.attributes["dspark.finish_reason"] == "abort"
    begun = {span.context.span_id for span in exporter.get_finished_spans()}
    assert all(s.parent.span_id in begun for s in exporter.get_finished_spans() if s is not whole)
    assert len(named(exporter, "dspark.queue")) == 1


def test_a_late_block_is_no_event_of_a_later_round(session, exporter):
    session.submit(traced())
    while not session.proposals:
        session.step(drafts=False)
    session.now += 1  # past every deadline
    session.step(drafts=False)
    session.rank.on_message(session.proposals[0], session.now)
    session.run()
    assert named(exporter, "dspark.round")[0].attributes["dspark.num_proposed"] == 0
    for each in named(exporter, "dspark.round"):
        came = "dspark.proposal" in [event.name for event in each.events]
        assert came == (each.attributes["dspark.num_proposed"] > 0)


def test_the_rounds_of_a_long_stream_are_counted_beyond_a_bound(session, exporter, monkeypatch):
    monkeypatch.setattr(rank_spans, "MAX_TRACED_ROUNDS", 3)
    session.submit(traced(num_tokens=40))
    session.run()
    (whole,) = named(exporter, "dspark.generate")
    assert len(named(exporter, "dspark.round")) == 3
    num_rounds = whole.attributes["dspark.num_rounds"]
    assert whole.attributes["dspark.num_untraced_rounds"] == num_rounds - 3 > 0


def test_a_repeated_admission_opens_nothing_and_a_newer_one_replaces_it(session, exporter):
    session.submit(traced(num_tokens=60))
    session.spans.receive(traced(num_tokens=60))
    session.spans.receive(replace(traced(num_tokens=60), generation=1))
    session.spans.end_gone(())
    wholes = named(exporter, "dspark.generate")
    assert [w.attributes["dspark.finish_reason"] for w in wholes] == ["replaced", "abort"]
    assert [w.attributes["dspark.generation"] for w in wholes] == [0, 1]


def test_without_a_tracer_a_traced_request_makes_nothing(exporter):
    session = TracedSession(None)
    session.submit(traced())
    session.run()
    assert not exporter.get_finished_spans()
    assert not any(commit.traceparents for commit in session.commits)
