"""`/openapi.json`: what the endpoints read and answer, from the same schemas that check requests.

Bodies are read by hand (their errors must be OpenAI's, with the field and the remedy), so the framework does not know
them; this page tells it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.explanations import ErrorAnswer
from cluster.openai_api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    "400": "A field is wrong; the error names it, its value and the remedy.",
    "401": "A key is needed.",
    "403": "A page of another origin, or a host name that is not ours.",
    "404": "No such model.",
    "413": "The body is too large.",
    "422": "A schema, expression or grammar that cannot be followed.",
    "429": "Too many requests, or every rank is full; Retry-After says when to come back.",
    "503": "No rank is ready; Retry-After says when to come back.",
    "504": "Longer than ingress.request_timeout_s.",
}


@dataclass(frozen=True)
class Operation:
    """A request with a body: what it is, and what the answer may be."""

    summary: str
    request: type[BaseModel]
    streams: bool = False


OPERATIONS = {
    "/v1/chat/completions": Operation("Answer a conversation.", ChatRequest, streams=True),
    "/v1/completions": Operation("Go on from a prompt.", CompletionRequest, streams=True),
    "/tokenize": Operation("Token ids of a prompt or of a conversation.", TokenizeRequest),
    "/detokenize": Operation("Text of token ids.", DetokenizeRequest),
}


def describe(app: FastAPI) -> None:
    """Let `app.openapi()` tell of request bodies, streams and errors too."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the framework's own way to extend it


def _complete(document: dict[str, Any]) -> None:
    mode: Literal["validation"] = "validation"
    asked: Any = [(operation.request, mode) for operation in OPERATIONS.values()]
    names, definitions = models_json_schema([*asked, (ErrorAnswer, mode)], ref_template=REFERENCE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    error = {"application/json": {"schema": names[(ErrorAnswer, mode)]}}
    for path, operation in OPERATIONS.items():
        described = document["paths"][path]["post"]
        described["summary"] = operation.summary
        body = {"application/json": {"schema": names[(operation.request, mode)]}}
        described["requestBody"] = {"required": True, "content": body}
        answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if operation.streams:
            answer["text/event-stream"] = {"schema": {"type": "string"}}
        described["responses"] = {
            "200": {"description": "The answer.", "content": answer},
            **{status: {"description": text, "content": error} for status, text in ERRORS.items()},
        }
