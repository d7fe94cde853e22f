"""One root span a request, under the client's own trace, whatever becomes of the request."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.telemetry import setup_tracing
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


async def test_the_span_hangs_under_the_clients_trace_and_the_rank_under_the_span(launch, spans):
    async with launch() as server:
        await server.client.post(CHAT_PATH, json=CHAT, headers=HEADERS)
        (span,) = spans.get_finished_spans()
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT_ID
        assert span.attributes["dspark.finish_reason"] == "stop"
        assert (
            server.ranks[0].admitted[0].traceparent
            == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
        )


async def test_every_way_to_end_ends_the_span(launch, spans):
    async with launch() as server:
        await Reader().read(server)
        await server.client.post(CHAT_PATH, json={**CHAT, "model": "other"})
        server.ranks[0].num_tokens_before_pause = 4
        await Reader().read(server, until_chars=4)
        await server.until(lambda: len(spans.get_finished_spans()) == 3)
        server.ranks[0].grant = False
        await server.client.post(CHAT_PATH, json=CHAT)
        outcomes = [span.attributes["dspark.finish_reason"] for span in spans.get_finished_spans()]
    assert outcomes == ["stop", "ApiError", "abort", "ApiError"]


async def test_without_an_sdk_the_clients_trace_still_reaches_the_rank(launch):
    async with launch() as server:
        await server.client.post(CHAT_PATH, json=CHAT, headers=HEADERS)
        await server.client.post(CHAT_PATH, json=CHAT)
        first, second = (request.traceparent for request in server.ranks[0].admitted)
    assert first is not None and TRACE_ID in first and second is None


def test_no_endpoint_means_no_sdk():
    assert setup_tracing("dspark", None) is False
