"""The HTTP front: OpenAI-compatible endpoints over live streams. Never imports torch."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Lifespan

from actors import tracing
from cluster import watch_routes
from cluster.answers import Answer, close_all, open_answers, outcome_of
from cluster.api_errors import ApiError, misdirected
from cluster.api_keys import KeyAccount
from cluster.connection import ClientGone, SseResponse, unless_disconnected
from cluster.dispatcher import Dispatcher
from cluster.explanations import AskRanks, ErrorAnswer, Explanation, explain
from cluster.host_guard import guard
from cluster.intake import Intake
from cluster.jobs import Job
from cluster.live_stream import NeverFitsError, NoReadyRankError, OverloadedError, StreamError
from cluster.loop_meter import LoopMeter
from cluster.observation import AskCluster, Observer
from cluster.openai_api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from cluster.openai_parse import parse_request
from cluster.openai_responses import Envelope
from cluster.openapi import describe
from cluster.replies import event_stream, failure_of, whole_answer
from cluster.request_trace import RequestTrace
from cluster.router import summary
from cluster.served_model import Access, ServedModel
from cluster.telemetry import FrontMetrics
from cluster.token_endpoints import detokenize, tokenize

logger = logging.getLogger(__name__)


class Front:
    """Answers requests; everything it needs is handed in.

    Args:
        model: the served model.
        intake: validation and tokenisation.
        dispatcher: started by the app's lifespan.
        request_timeout_s: longest a request may take.
        ask_ranks: what the ranks kept of a response's rounds.
        access: who may call.
        ask_cluster: what the metrics and the live page show of other processes; None: nothing of them.
        keep_alive_s: silence of a streamed answer after which a comment is sent.
    """

    def __init__(
        self,
        model: ServedModel,
        intake: Intake,
        dispatcher: Dispatcher,
        request_timeout_s: float,
        ask_ranks: AskRanks,
        access: Access | None = None,
        ask_cluster: AskCluster | None = None,
        keep_alive_s: float = 15.0,
    ) -> None:
        self.access = access or Access()
        self.model = model
        self.intake = intake
        self.dispatcher = dispatcher
        self.metrics = FrontMetrics()
        self.meter = LoopMeter()
        counters = partial(
            watch_routes.front_snapshot, self.metrics, dispatcher, self.access.keys, self.meter
        )
        self.observer = Observer(dispatcher.link.endpoint.name, counters, ask_cluster)
        self._request_timeout_s, self._keep_alive_s = request_timeout_s, keep_alive_s
        self.ask_ranks = ask_ranks

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, "chat", ChatRequest)

    async def completion(self, request: Request) -> Response:
        return await self._serve(request, "completion", CompletionRequest)

    async def tokenize(self, request: Request) -> Response:
        self.authorise(request)
        parsed = parse_request(TokenizeRequest, await self._body(request))
        return JSONResponse(tokenize(self.intake, parsed))

    async def detokenize(self, request: Request) -> Response:
        self.authorise(request)
        parsed = parse_request(DetokenizeRequest, await self._body(request))
        return JSONResponse(detokenize(self.intake, parsed))

    def authorise(self, request: Request) -> KeyAccount:
        return self.access.keys.account(request.headers.get("authorization"))

    async def _serve(
        self,
        request: Request,
        kind: Literal["chat", "completion"],
        schema: type[ChatRequest] | type[CompletionRequest],
    ) -> Response:
        account = self.authorise(request)
        account.take_request(time.monotonic())
        parsed = parse_request(schema, await self._body(request))
        self.metrics.num_ignored_fields += len(parsed.model_extra or ())
        envelope = self._envelope(kind, parsed)
        parent = request.headers.get("traceparent")
        trace = RequestTrace.begin(self.model.name, envelope.response_id, parsed, parent)
        try:
            with trace.part(tracing.SPAN_TOKENISE):
                jobs = self.intake.jobs(parsed, envelope.response_id, trace.traceparent)
            places = account.open_streams(len(jobs))
            try:
                with trace.part(tracing.SPAN_PLACE):
                    opening = self._open(jobs, trace)
                    answers = await unless_disconnected(request, opening, close_all)
            except BaseException:
                places.give_back()
                raise
        except BaseException as error:
            trace.fail(error)
            raise

        def close() -> None:
            close_all(answers)
            places.give_back()
            trace.end(outcome_of(answers))

        if parsed.stream:
            events = event_stream(answers, envelope, self.intake.codec)
            return SseResponse(events, close, self._keep_alive_s)
        try:
            whole = whole_answer(answers, envelope, self.intake.codec)
            return JSONResponse(await unless_disconnected(request, whole))
        except StreamError as error:
            raise failure_of(error) from error
        finally:
            close()

    async def _body(self, request: Request) -> bytes:
        most, body = self.access.max_body_bytes, bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(
                        413,
                        f"the body is larger than {most} bytes; shorten it",
                        code="body_too_large",
                    )
        except ClientDisconnect as error:
            raise ClientGone from error
        return bytes(body)

    async def _open(self, jobs: list[Job], trace: RequestTrace) -> list[Answer]:
        codec, timeout_s = self.intake.codec, self._request_timeout_s
        try:
            return await open_answers(jobs, self.dispatcher, codec, self.metrics, trace, timeout_s)
        except OverloadedError as error:
            wait_s = max(1, math.ceil(error.retry_after_s))
            raise ApiError(429, str(error), code="overloaded", retry_after_s=wait_s) from error
        except NeverFitsError as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except NoReadyRankError as error:
            raise ApiError(503, str(error), code="not_ready", retry_after_s=1) from error

    def _envelope(self, kind: Literal["chat", "completion"], parsed: GenerationRequest) -> Envelope:
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        return Envelope(
            kind=kind,
            response_id=f"{prefix}-{secrets.token_hex(16)}",
            created=int(time.time()),
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            include_usage=parsed.include_usage,
        )

    async def explain(self, request: Request) -> Response:
        """Why the rounds of a response were verified as far as they were (C11)."""
        self.authorise(request)
        found = await explain(request.path_params["response_id"], self.ask_ranks)
        return JSONResponse(found.model_dump())

    # --- about the server -------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        self.authorise(request)
        return JSONResponse({"object": "list", "data": [self.model.card(self.intake.codec)]})

    async def one_model(self, request: Request) -> Response:
        self.authorise(request)
        name = request.path_params["name"]
        self.intake.check_model(name)
        return JSONResponse(self.model.card(self.intake.codec))

    def health(self) -> tuple[int, dict[str, Any]]:
        """Ready as soon as one rank is."""
        router = self.dispatcher.router
        ready = any(route.state == "ready" for route in router.table.ranks)
        content: dict[str, Any] = {
            "status": "ready" if ready else "unavailable",
            "model": self.model.name,
            "num_streams": self.dispatcher.num_streams,
            "ranks": router.describe(),
            "others": [summary(route) for route in router.table.others],
        }
        if not ready:
            content["reason"] = router.why_unready()
        return (200 if ready else 503), content


def build_app(front: Front, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The ASGI application over `front`; starting and stopping its dispatcher is for `lifespan` or the caller."""
    app = FastAPI(title="dspark-cluster", docs_url=None, redoc_url=None, lifespan=lifespan)
    guard(app, front.access)
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("POST", "/v1/chat/completions", front.chat),
        ("POST", "/v1/completions", front.completion),
        ("POST", "/tokenize", front.tokenize),
        ("POST", "/detokenize", front.detokenize),
        ("GET", "/v1/models", front.models),
        ("GET", "/v1/models/{name:path}", front.one_model),
    ]
    for method, path, handler in routes:
        app.add_api_route(path, _guarded(front, handler), methods=[method])

    @app.get(
        "/v1/requests/{response_id}/explain",
        response_model=Explanation,
        responses={404: {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}},
    )
    async def explain_request(
        request: Request,
        response_id: Annotated[str, Path(description="The `id` of an answer of this cluster.")],
    ) -> Response:
        """Why each round of a response was verified as far as it was: survivals, λ, K, and what cut it."""
        assert response_id == request.path_params["response_id"]
        return await _guarded(front, front.explain)(request)

    @app.get("/health")
    async def health() -> Response:
        status, content = front.health()
        return JSONResponse(content, status)

    watch_routes.add_routes(app, front.observer, front.ask_ranks, front.authorise, front.model.name)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked, allowed = f"{request.method} {request.url.path}", (error.headers or {}).get("Allow")
        return _error_response(misdirected(error.status_code, asked, allowed, str(error.detail)))

    app.add_exception_handler(HTTPException, on_http_error)
    describe(app)
    return app


def _guarded(
    front: Front, handler: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Every failure becomes an answer in OpenAI's shape, and is counted."""

    async def answer(request: Request) -> Response:
        try:
            front.access.check_origin(request.headers.get("origin"), request.headers.get("host"))
            response = await handler(request)
        except ApiError as error:
            response = _error_response(error)
        except ClientGone:
            front.metrics.num_disconnected += 1
            response = Response(status_code=499)
        except Exception:
            logger.exception("a request failed in the ingress")
            response = _error_response(
                ApiError(500, "internal error of the ingress", code="internal_error")
            )
        front.metrics.responses[response.status_code] += 1
        return response

    return answer


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)
