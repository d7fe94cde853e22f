"""Names of spans, their attributes and metrics, so that all processes spell them alike. OpenTelemetry API only.

Without an SDK every call here is a no-op. The SDK is installed by the process that wants to export.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

INSTRUMENTATION: Final = "dspark"

# Spans, from the request inwards.
SPAN_REQUEST: Final = "dspark.request"  # ingress: from validation to the last byte
SPAN_RESERVE: Final = "dspark.reserve"  # ingress: choosing a rank and getting room there
SPAN_STREAM: Final = "dspark.stream"  # target rank: from admission to the last token
SPAN_STEP: Final = "dspark.step"  # target rank: one flattened forward
SPAN_DRAFT: Final = "dspark.draft"  # drafter: one batch of blocks
SPAN_LOAD: Final = "dspark.load"  # target, drafter: weights

# Attributes.
ATTR_REQUEST_ID: Final = "dspark.request_id"
ATTR_GENERATION: Final = "dspark.generation"
ATTR_RANK: Final = "dspark.rank"
ATTR_DRAFTER: Final = "dspark.drafter"
ATTR_STEP: Final = "dspark.step"
ATTR_NUM_REQUESTS: Final = "dspark.num_requests"
ATTR_BATCH_TOKENS: Final = "dspark.batch_tokens"
ATTR_NUM_SCHEDULED: Final = "dspark.num_scheduled"
ATTR_NUM_ACCEPTED: Final = "dspark.num_accepted"
ATTR_FINISH_REASON: Final = "dspark.finish_reason"

# Metrics; the unit is the suffix.
METRIC_STEP_TIME: Final = "dspark_step_time_s"
METRIC_DRAFT_TIME: Final = "dspark_draft_time_s"
METRIC_DRAFT_WAIT: Final = "dspark_draft_wait_s"
METRIC_COMMITTED_TOKENS: Final = "dspark_committed_tokens"
METRIC_PROPOSED_TOKENS: Final = "dspark_proposed_tokens"
METRIC_SCHEDULED_TOKENS: Final = "dspark_scheduled_tokens"
METRIC_ACCEPTED_TOKENS: Final = "dspark_accepted_tokens"
METRIC_FREE_BLOCKS: Final = "dspark_free_blocks"
METRIC_LINK_DROPPED: Final = "dspark_link_dropped_messages"
METRIC_LINK_REFUSED: Final = "dspark_link_refused_messages"


def tracer() -> Tracer:
    """Our tracer; a no-op one until an SDK is installed."""
    return trace.get_tracer(INSTRUMENTATION)


def span(
    name: str, attributes: Mapping[str, str | int | float], parent: Context | None = None
) -> AbstractContextManager[Span]:
    """A current span named by one of the constants above."""
    return tracer().start_as_current_span(name, context=parent, attributes=dict(attributes))


def context_of(traceparent: str | None) -> Context | None:
    """The parent a request carries (W3C `traceparent`), or None."""
    return propagate.extract({"traceparent": traceparent}) if traceparent else None


def traceparent() -> str | None:
    """The current span as a W3C `traceparent`, or None outside of one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent")
