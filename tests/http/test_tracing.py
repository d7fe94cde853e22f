"""One root span a request, under the client's own trace, whatever becomes of the request."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanKind

from actors.tracing import is_sampled, setup
from configs.schema import TelemetryConfig
from tests.http.harness import CHAT, CHAT_PATH
from tests.http.sse_reader import Reader

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def spans(monkeypatch):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("actors.tracing.tracer", lambda: provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(spans, name):
    return [span for span in spans.get_finished_spans() if span.name == name]


async def test_the_span_hangs_under_the_clients_trace_and_the_rank_under_the_span(launch, spans):
    async with launch() as server:
        await server.client.post(CHAT_PATH, json={**CHAT, "seed": 7}, headers=HEADERS)
        (root,) = named(spans, "chat tiny-bytes")
        admitted = server.ranks[0].admitted[0]
    assert root.kind is SpanKind.SERVER
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT_ID
    assert admitted.traceparent == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"
    for name in ("dspark.tokenise", "dspark.place", "dspark.detokenise"):
        (part,) = named(spans, name)
        assert part.parent is not None and part.parent.span_id == root.context.span_id
    said = root.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "dspark"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny-bytes"
    assert said["gen_ai.request.seed"] == 7 and said["gen_ai.response.id"] == admitted.request_id
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.usage.input_tokens"] == len(admitted.prompt_ids)
    assert said["gen_ai.usage.output_tokens"] > 40
    assert said["gen_ai.response.time_to_first_chunk"] >= 0


async def test_every_way_to_end_ends_the_span(launch, spans):
    def ended():
        return named(spans, "chat tiny-bytes")

    async with launch() as server:
        await Reader().read(server)
        await server.client.post(CHAT_PATH, json={**CHAT, "model": "other"})
        server.ranks[0].num_tokens_before_pause = 4
        await Reader().read(server, until_chars=4)
        await server.until(lambda: len(ended()) == 3)
        server.ranks[0].grant = False
        await server.client.post(CHAT_PATH, json=CHAT)
    outcomes = [
        span.attributes.get("error.type") or span.attributes["gen_ai.response.finish_reasons"][0]
        for span in ended()
    ]
    assert outcomes == ["stop", "ApiError", "abort", "ApiError"]


async def test_a_request_that_is_not_sampled_tells_the_rank_so(launch, monkeypatch):
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr("actors.tracing.tracer", lambda: provider.get_tracer("test"))
    async with launch() as server:
        await server.client.post(CHAT_PATH, json=CHAT)
        (admitted,) = server.ranks[0].admitted
    assert admitted.traceparent is not None and not is_sampled(admitted.traceparent)
    provider.shutdown()


async def test_off_means_that_no_span_is_made_anywhere(launch, monkeypatch):
    def refuse(*_args, **_more):
        raise AssertionError("a span was made")

    for kind in (NonRecordingSpan, SdkSpan):
        monkeypatch.setattr(kind, "__init__", refuse)
    async with launch() as server:
        await Reader().read(server)
        await server.client.post(CHAT_PATH, json={**CHAT, "model": "other"})
        assert (await server.client.post(CHAT_PATH, json=CHAT, headers=HEADERS)).status_code == 200


async def test_without_an_sdk_the_clients_trace_still_reaches_the_rank(launch):
    async with launch() as server:
        await server.client.post(CHAT_PATH, json=CHAT, headers=HEADERS)
        await server.client.post(CHAT_PATH, json=CHAT)
        first, second = (request.traceparent for request in server.ranks[0].admitted)
    assert first is not None and TRACE_ID in first and second is None


@pytest.mark.parametrize("telemetry", [None, TelemetryConfig()])
def test_no_endpoint_means_no_tracer(telemetry):
    assert setup(telemetry, "target", "target-0") is False
