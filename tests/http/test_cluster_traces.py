"""A request through HTTP, Serve, rank and drafter is one trace in an ordinary collector, parent to child."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.http.otlp_collector import Collector, SeenSpan
from tests.http.served import ServeProcess

MODEL = "smollm2-135m-instruct"
PROMPT = [(7 * i) % 900 for i in range(300)]  # longer than a step: prefilled in chunks

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[ServeProcess, Collector]]:
    collector = Collector()
    telemetry = {"otlp_endpoint": collector.url, "sample_share": 0.0, "service_name": "test"}
    process = ServeProcess("tests.http.cluster_process", json.dumps({"telemetry": telemetry}))
    process.until(lambda: process.ask("settled") == "True", 60)
    yield process, collector
    process.quit()
    collector.close()


def complete(
    url: str, traceparent: str | None, num_tokens: int = 60, **more: Any
) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, **more}
    headers = {"traceparent": traceparent} if traceparent else {}
    answer = httpx.post(f"{url}/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.05)


def trace_of(traced: tuple[ServeProcess, Collector], **more: Any) -> tuple[list[SeenSpan], Any]:
    process, collector = traced
    trace_id = secrets.token_hex(16)
    answer = complete(process.url, f"00-{trace_id}-{secrets.token_hex(8)}-01", **more)

    def is_whole() -> bool:
        names = {span.name: span for span in collector.of_trace(trace_id)}
        generate = names.get("dspark.generate")
        num_rounds = generate.attributes["dspark.num_rounds"] if generate else None
        rounds = [s for s in collector.of_trace(trace_id) if s.name == "dspark.round"]
        # The drafter exports on its own: its spans of the last rounds may come after the root.
        drafted = {r.span_id for r in rounds if r.attributes["dspark.num_proposed"]}
        drafts = {s.parent_id for s in collector.of_trace(trace_id) if s.name == "dspark.draft"}
        is_complete = len(rounds) == num_rounds and drafted <= drafts
        return f"text_completion {MODEL}" in names and is_complete

    until(is_whole)
    return collector.of_trace(trace_id), answer


def test_every_round_is_there_with_its_draft_budget_verification_and_commit(traced):
    spans, answer = trace_of(traced)
    by_id = {span.span_id: span for span in spans}
    counts = answer["usage"]["dspark"]
    rounds = [span for span in spans if span.name == "dspark.round"]
    assert len(rounds) == counts["num_rounds"] > 0
    assert sum(r.attributes["dspark.verify.len"] for r in rounds) == counts["num_scheduled"] > 0
    assert sum(r.attributes["dspark.num_accepted"] for r in rounds) >= counts["num_accepted"] > 0
    for each in rounds:
        assert {"dspark.budget", "dspark.commit"} <= set(each.events)
        children = [span for span in spans if span.parent_id == each.span_id]
        assert [c.name for c in children if c.role == "target"] == ["dspark.verify"]
        drafted = each.attributes["dspark.num_proposed"] > 0
        assert ("dspark.proposal" in each.events) == drafted
        if drafted:
            (draft,) = [c for c in children if c.role == "drafter"]
            assert draft.name == "dspark.draft" and draft.instance == "drafter-0"
    parents = {(by_id[span.parent_id].name, span.name) for span in spans if span.parent_id in by_id}
    root = f"text_completion {MODEL}"
    assert parents == {
        (root, "dspark.tokenise"),
        (root, "dspark.place"),
        (root, "dspark.detokenise"),
        (root, "dspark.generate"),
        ("dspark.generate", "dspark.queue"),
        ("dspark.generate", "dspark.prefill"),
        ("dspark.generate", "dspark.round"),
        ("dspark.round", "dspark.verify"),
        ("dspark.round", "dspark.draft"),
    }
    assert {span.role for span in spans} == {"ingress", "target", "drafter"}


def test_the_chunks_of_a_prompt_add_up_and_spans_lie_inside_their_parents(traced):
    fresh = PROMPT[::-1]  # nothing of it is in the prefix cache
    spans, _ = trace_of(traced, prompt=fresh)
    by_id = {span.span_id: span for span in spans}
    chunks = [span for span in spans if span.name == "dspark.prefill"]
    assert len(chunks) > 1
    assert sum(c.attributes["dspark.num_tokens"] for c in chunks) == len(fresh)
    for span in spans:
        assert span.end_ns >= span.start_ns > 0
        parent = by_id.get(span.parent_id)
        if parent is not None and parent.role == span.role:
            assert parent.start_ns <= span.start_ns and span.end_ns <= parent.end_ns


def test_without_speculation_the_spans_are_complete_too(traced):
    spans, answer = trace_of(traced, dspark={"speculation": False})
    rounds = [span for span in spans if span.name == "dspark.round"]
    assert len(rounds) == answer["usage"]["dspark"]["num_rounds"] == 59
    assert {r.attributes["dspark.verify.len"] for r in rounds} == {0}
    assert not [span for span in spans if span.role == "drafter"]


def test_a_request_that_is_not_sampled_leaves_no_span(traced):
    process, collector = traced
    complete(process.url, None)
    before = {span.trace_id for span in collector.spans if "completion" in span.name}
    trace_of(traced)  # whatever was exported before it has arrived with it
    after = {span.trace_id for span in collector.spans if "completion" in span.name}
    assert len(after - before) == 1
