"""What a client is told when something is wrong: OpenAI's error object, naming field, value and remedy."""

from __future__ import annotations

import json

MAX_SHOWN_VALUE = 80  # characters of a bad value repeated to the client

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_request(field: str, value: object, remedy: str, code: str = "invalid_value") -> ApiError:
    """400 that names the field, the value and the remedy."""
    return ApiError(400, f"{field}={shown(value)}: {remedy}", param=field, code=code)


def misdirected(status: int, asked: str, allowed: str | None, detail: str) -> ApiError:
    """What to say of a method and path that are not served; `allowed` methods come with a 405."""
    if status == 404:
        return ApiError(404, f"{asked}: no such path; /openapi.json lists them", code="not_found")
    if status == 405:
        remedy = f"use {allowed}" if allowed else "use another method"
        return ApiError(405, f"{asked}: {remedy}", code="method_not_allowed")
    return ApiError(status, detail)


def shown(value: object) -> str:
    """The value as JSON, shortened; lone surrogates stay escaped."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 1] + "…"
