"""The trace of one request in the ingress: its root span, named by the GenAI conventions, and what hangs below."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import Span, SpanKind, Tracer

from actors import tracing
from cluster.openai_api import ChatRequest, GenerationRequest

PROVIDER = "dspark"


@dataclass(frozen=True)
class Outcome:
    """How a response ended."""

    finish_reasons: list[str]
    num_input_tokens: int
    num_output_tokens: int
    first_token_s: float | None  # since its arrival


@dataclass
class RequestTrace:
    """One request. Without a tracer it makes nothing and passes the client's own trace on.

    Attributes:
        traceparent: what the rank hangs its spans on; None where nobody traces.
        begun_s: when the request was read, on the monotonic clock.
    """

    traceparent: str | None
    _tracer: Tracer | None = None
    _root: Span | None = None
    begun_s: float = field(default_factory=time.monotonic)
    _detokenise: Span | None = None
    _busy_s: float = 0.0

    @classmethod
    def begin(
        cls, model: str, response_id: str, request: GenerationRequest, parent: str | None
    ) -> RequestTrace:
        """Open the root span; `parent` is the client's traceparent, if it sent one."""
        tracer = tracing.tracer()
        if tracer is None:
            return cls(parent)
        operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
        root = tracer.start_span(
            f"{operation} {model}",
            tracing.context_of(parent),
            SpanKind.SERVER,
            {
                tracing.GEN_AI_OPERATION: operation,
                tracing.GEN_AI_PROVIDER: PROVIDER,
                tracing.GEN_AI_RESPONSE_ID: response_id,
                tracing.GEN_AI_RESPONSE_MODEL: model,
                **_asked(request, model),
            },
        )
        return cls(tracing.traceparent_of(root), tracer, root)

    @property
    def is_recording(self) -> bool:
        return self._root is not None and self._root.is_recording()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A child span around what is done inside."""
        if self._tracer is None or self._root is None:
            yield
            return
        child = self._tracer.start_span(name, tracing.below(self._root))
        try:
            yield
        finally:
            child.end()

    @contextmanager
    def detokenising(self) -> Iterator[None]:
        """Around each piece of text: one child span from the first to the last, with the time spent inside."""
        if not self.is_recording:
            yield
            return
        assert self._tracer is not None and self._root is not None
        if self._detokenise is None:
            context = tracing.below(self._root)
            self._detokenise = self._tracer.start_span(tracing.SPAN_DETOKENISE, context)
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started_s

    def end(self, outcome: Outcome) -> None:
        """The response is over."""
        if self._root is None:
            return
        if self._detokenise is not None:
            self._detokenise.set_attribute(tracing.ATTR_BUSY_S, self._busy_s)
            self._detokenise.end()
        if outcome.first_token_s is not None:
            self._root.set_attribute(tracing.GEN_AI_FIRST_CHUNK, outcome.first_token_s)
        self._root.set_attributes(
            {
                tracing.GEN_AI_FINISH_REASONS: outcome.finish_reasons,
                tracing.GEN_AI_INPUT_TOKENS: outcome.num_input_tokens,
                tracing.GEN_AI_OUTPUT_TOKENS: outcome.num_output_tokens,
            }
        )
        self._root.end()

    def fail(self, error: BaseException) -> None:
        """There is no response."""
        if self._root is not None:
            self._root.set_attribute(tracing.ERROR_TYPE, type(error).__name__)
            self._root.end()


def _asked(
    request: GenerationRequest, model: str
) -> dict[str, str | bool | int | float | list[str]]:
    """What the client asked for; what it left open is left out."""
    wanted = {
        "model": request.model or model,
        "max_tokens": getattr(request, "max_completion_tokens", None) or request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "stream": bool(request.stream),
        "stop_sequences": [*request.stop_strings] or None,
    }
    return {f"{tracing.GEN_AI_REQUEST}{k}": v for k, v in wanted.items() if v is not None}
