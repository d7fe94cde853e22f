"""Names of spans and attributes, so that all processes spell them alike, and the few calls that make spans.

Nothing is made until `setup` was called with an endpoint in this process: `tracer` is None, and whoever would make
spans asks it first. A request carries its trace as a W3C `traceparent`; only a sampled one makes spans below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from configs.schema import TelemetryConfig

# Spans, from the request inwards. The request's own is named by the GenAI conventions: "{operation} {model}".
SPAN_TOKENISE: Final = "dspark.tokenise"  # ingress: chat template and tokens
SPAN_PLACE: Final = "dspark.place"  # ingress: choosing a rank and getting room there
SPAN_DETOKENISE: Final = "dspark.detokenise"  # ingress: from the first token to the last
SPAN_GENERATE: Final = "dspark.generate"  # target rank: from admission to the last token
SPAN_QUEUE: Final = "dspark.queue"  # target rank: admitted, not in a step yet
SPAN_PREFILL: Final = "dspark.prefill"  # target rank: one chunk of a prompt
SPAN_ROUND: Final = "dspark.round"  # target rank: from asking for a block to the commit
SPAN_VERIFY: Final = "dspark.verify"  # target rank: the step that held the round
SPAN_DRAFT: Final = "dspark.draft"  # drafter: the batch that held the block
SPAN_LOAD: Final = "dspark.load"  # target, drafter: weights
SPAN_LAUNCH: Final = "dspark.launch"  # driver: until the endpoint answers

# Events of a round.
EVENT_PROPOSAL: Final = "dspark.proposal"  # the block has come
EVENT_BUDGET: Final = "dspark.budget"  # K, lambda and their rule are applied
EVENT_COMMIT: Final = "dspark.commit"  # tokens join the stream
EVENT_PREEMPTED: Final = "dspark.preempted"  # memory ran out; computed again later

# GenAI semantic conventions (development), as of opentelemetry-semantic-conventions 0.66.
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST: Final = (
    "gen_ai.request."  # model, max_tokens, temperature, top_p, top_k, seed, stream, stop_sequences
)
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"

# Ours.
ATTR_REQUEST_ID: Final = "dspark.request_id"
ATTR_GENERATION: Final = "dspark.generation"
ATTR_RANK: Final = "dspark.rank"
ATTR_DRAFTER: Final = "dspark.drafter"
ATTR_STEP: Final = "dspark.step"
ATTR_NUM_REQUESTS: Final = "dspark.num_requests"
ATTR_BATCH_TOKENS: Final = "dspark.batch_tokens"
ATTR_NUM_TOKENS: Final = "dspark.num_tokens"
ATTR_CONTEXT_LEN: Final = "dspark.context_len"
ATTR_NUM_ROUNDS: Final = "dspark.num_rounds"
ATTR_NUM_UNTRACED_ROUNDS: Final = "dspark.num_untraced_rounds"
ATTR_NUM_PROPOSED: Final = "dspark.num_proposed"
ATTR_VERIFY_LEN: Final = "dspark.verify.len"
ATTR_CUT_BY: Final = "dspark.verify.cut_by"
ATTR_SURVIVALS: Final = "dspark.survivals"
ATTR_NUM_ACCEPTED: Final = "dspark.num_accepted"
ATTR_BUDGET: Final = "dspark.budget.max_draft_tokens"  # K
ATTR_PRICE: Final = "dspark.budget.min_survival"  # lambda
ATTR_RULE: Final = "dspark.budget.rule"
ATTR_FINISH_REASON: Final = "dspark.finish_reason"
ATTR_BUSY_S: Final = "dspark.busy_s"

Value = str | bool | int | float | Sequence[str] | Sequence[float]
Attributes = Mapping[str, Value]

_EXPORT_INTERVAL_MS = 1000
_MAX_QUEUED_SPANS = 16_384
_FLUSH_TIMEOUT_MS = 2000
_PROPAGATOR = TraceContextTextMapPropagator()
_installed: tuple[Tracer, object] | None = None  # with its provider; set once, by `setup`


def tracer() -> Tracer | None:
    """Of this process; None: it makes no spans."""
    return None if _installed is None else _installed[0]


def setup(telemetry: TelemetryConfig | None, role: str, name: str) -> bool:
    """Have this process export its spans, if an endpoint is configured; False when it will make none.

    Ray and its libraries may use OpenTelemetry too: the provider is ours alone, not the process's global one.
    """
    global _installed
    if telemetry is None or telemetry.otlp_endpoint is None or _installed is not None:
        return _installed is not None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(telemetry.sample_share)),
        resource=Resource.create(
            {
                "service.name": telemetry.service_name,
                "service.instance.id": name,
                "dspark.role": role,
            }
        ),
    )
    exporter = OTLPSpanExporter(endpoint=f"{telemetry.otlp_endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_QUEUED_SPANS,
            schedule_delay_millis=_EXPORT_INTERVAL_MS,
        )
    )
    _installed = provider.get_tracer("dspark"), provider
    return True


def flush() -> None:
    """Send what is left; called before the process ends."""
    if _installed is not None:
        _installed[1].force_flush(_FLUSH_TIMEOUT_MS)  # type: ignore[attr-defined]  # the SDK's own method


@contextmanager
def span(name: str, attributes: Attributes, parent: Context | None = None) -> Iterator[Span | None]:
    """A span around what is done inside; None where this process makes none."""
    found = tracer()
    if found is None:
        yield None
        return
    opened = found.start_span(name, context=parent, attributes=dict(attributes))
    try:
        yield opened
    except BaseException as error:
        opened.set_attribute(ERROR_TYPE, type(error).__name__)
        raise
    finally:
        opened.end()


def is_sampled(traceparent: str | None) -> bool:
    """Whether spans shall be made below this parent."""
    parent = context_of(traceparent)
    return (
        trace.get_current_span(parent).get_span_context().trace_flags.sampled if parent else False
    )


def context_of(traceparent: str | None) -> Context | None:
    """The parent a request carries, or None."""
    if not traceparent:
        return None
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def below(parent: Span) -> Context:
    """The context of a child."""
    return trace.set_span_in_context(parent, Context())


def traceparent_of(parent: Span) -> str:
    """What another process hangs its spans on."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=below(parent))
    return carrier["traceparent"]
