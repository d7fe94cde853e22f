"""What the front counts, as Prometheus text; and the OpenTelemetry SDK, off unless asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace

from actors import tracing
from actors.core.messages import LoadView, RankLoad
from cluster.streams import SpeculationCounts

LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Cumulative buckets of seconds, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def render(self, name: str, help_text: str) -> list[str]:
        lines = [f"# HELP {name} {help_text}", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


@dataclass
class FrontMetrics:
    """Counts of one ingress replica since its start; they only grow."""

    responses: Counter[int] = field(default_factory=Counter)  # by HTTP status
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    num_disconnected: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    first_token_s: Histogram = field(default_factory=Histogram)
    token_interval_s: Histogram = field(default_factory=Histogram)  # mean of a request

    def finish(
        self, reason: str, num_prompt: int, num_generated: int, counts: SpeculationCounts
    ) -> None:
        """A stream is over."""
        self.finished[reason] += 1
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        self.speculation += counts

    def render(self, gauges: dict[str, float], counters: dict[str, int]) -> str:
        """Prometheus text. `vllm:` names are there for tools that read them; ours say what is meant."""
        spec = self.speculation
        lines: list[str] = []

        def add(kind: str, name: str, help_text: str, values: dict[str, float | int]) -> None:
            lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"])
            lines.extend(f"{name}{labels} {value}" for labels, value in values.items())

        for name, help_text, value in (
            (
                "vllm:prompt_tokens_total",
                "Prompt tokens of finished requests.",
                self.num_prompt_tokens,
            ),
            ("vllm:generation_tokens_total", "Generated tokens.", self.num_generated_tokens),
            ("vllm:spec_decode_num_drafts_total", "Draft and verify rounds.", spec.num_rounds),
            (
                "vllm:spec_decode_num_draft_tokens_total",
                "Draft tokens verified.",
                spec.num_scheduled,
            ),
            ("vllm:spec_decode_num_accepted_tokens_total", "Accepted.", spec.num_accepted),
            ("dspark:num_rounds_total", "Draft and verify rounds.", spec.num_rounds),
            ("dspark:num_proposed_total", "Draft tokens proposed.", spec.num_proposed),
            ("dspark:num_scheduled_total", "Draft tokens sent to the target.", spec.num_scheduled),
            ("dspark:num_accepted_total", "Draft tokens accepted.", spec.num_accepted),
            ("dspark:disconnects_total", "Clients that left.", self.num_disconnected),
        ):
            add("counter", name, help_text, {"": value})
        for name, value in counters.items():
            add(
                "counter",
                f"dspark:{name}_total",
                "Streams and messages of the dispatcher.",
                {"": value},
            )
        for name, gauge in gauges.items():
            add("gauge", name, "Now.", {"": gauge})
        statuses = {f'{{status="{status}"}}': n for status, n in sorted(self.responses.items())}
        add("counter", "dspark:responses_total", "Answers by HTTP status.", {**statuses})
        reasons = {f'{{finished_reason="{reason}"}}': n for reason, n in self.finished.items()}
        add("counter", "vllm:request_success_total", "Finished streams.", {**reasons})
        lines += self.first_token_s.render(
            "vllm:time_to_first_token_seconds", "Arrival to first text."
        )
        lines += self.token_interval_s.render(
            "vllm:time_per_output_token_seconds", "Mean interval after the first token."
        )
        return "\n".join(lines) + "\n"


def rank_gauges(loads: Sequence[RankLoad]) -> str:
    """What the allocator last decided for each rank, as Prometheus text."""
    budgets = [load.budget for load in loads if load.budget is not None]
    errors = {load.rank: load.prediction_error for load in loads}
    lines: list[str] = []
    for name, help_text, values in (
        (
            "dspark:rank_budget_tokens",
            "Most draft tokens a step may verify.",
            {budget.rank: float(budget.max_draft_tokens) for budget in budgets},
        ),
        (
            "dspark:rank_price",
            "Lowest survival (or worth) verified.",
            {budget.rank: budget.min_survival for budget in budgets},
        ),
        (
            "dspark:rank_prediction_error",
            "Mean relative error of the step times predicted for its group, or for itself.",
            {rank: error for rank, error in errors.items() if error is not None},
        ),
    ):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"] if values else []
        lines += [f'{name}{{rank="{rank}"}} {value:g}' for rank, value in values.items()]
    return "".join(line + "\n" for line in lines)


def curve_counters(view: LoadView) -> str:
    """Where budgets could not be searched for, as Prometheus text; empty before the allocator's first word."""
    if view.version < 0:
        return ""
    fallbacks = {f'{{rank="{load.rank}"}}': load.num_fallback_steps for load in view.ranks}
    lines: list[str] = []
    for name, help_text, values in (
        (
            "dspark:fallback_steps_total",
            "Steps decided without a search: the curve is flat, or predictions have parted from measurements.",
            fallbacks,
        ),
        (
            "dspark:refused_curves_total",
            "Measured cost curves that could not be used.",
            {"": view.num_refused_curves},
        ),
    ):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} counter"]
        lines += [f"{name}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def render_keys(by_name: Mapping[str, int], num_unknown: int) -> str:
    """Who called, as Prometheus text: requests by the name of their key, and those without a known one."""
    name, unknown = "dspark:key_requests_total", "dspark:unknown_keys_total"
    lines = [f"# HELP {name} Requests by the name of their key.", f"# TYPE {name} counter"]
    for key, count in sorted(by_name.items()):
        label = key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'{name}{{key="{label}"}} {count}')
    lines += [f"# HELP {unknown} Requests without a known key.", f"# TYPE {unknown} counter"]
    return "\n".join([*lines, f"{unknown} {num_unknown}", ""])


@dataclass
class DispatchCounters:
    """What happened since the start; every count only grows."""

    num_placed: int = 0
    num_replayed: int = 0
    num_refused: int = 0
    num_unanswered: int = 0
    num_aborted: int = 0
    num_late_deltas: int = 0
    num_stray_deltas: int = 0
    num_routing_failures: int = 0


class RequestSpan:
    """The root span of a request, from validation to its last byte; a no-op until an SDK is installed.

    Attributes:
        traceparent: what the rank hangs its spans on; the client's own where this process does not trace.
    """

    def __init__(self, request_id: str, parent: str | None) -> None:
        self._span = tracing.tracer().start_span(
            tracing.SPAN_REQUEST,
            context=tracing.context_of(parent),
            kind=trace.SpanKind.SERVER,
            attributes={tracing.ATTR_REQUEST_ID: request_id},
        )
        with trace.use_span(self._span):
            self.traceparent = tracing.traceparent() or parent

    def end(self, outcome: str) -> None:
        self._span.set_attribute(tracing.ATTR_FINISH_REASON, outcome)
        self._span.end()


def setup_tracing(service_name: str, otlp_endpoint: str | None) -> bool:
    """Install the OpenTelemetry SDK with an OTLP exporter; False when no endpoint is configured.

    The actors use the OpenTelemetry API only, which does nothing until this was called in their process.

    Raises:
        ImportError: an endpoint is configured, but the `telemetry` extra is not installed.
    """
    if otlp_endpoint is None:
        return False
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint)))
    trace.set_tracer_provider(provider)
    return True
