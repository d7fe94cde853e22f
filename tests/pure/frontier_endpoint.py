"""An endpoint for the bench that answers every prompt with its own words."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx

from cluster.client import EndpointClient

COUNTS = {"num_rounds": 4, "num_proposed": 20, "num_scheduled": 12, "num_accepted": 6}


def events(*items: dict[str, Any] | str) -> httpx.Response:
    lines = [f"data: {item if isinstance(item, str) else json.dumps(item)}\n\n" for item in items]
    return httpx.Response(200, text="".join(lines))


class Endpoint:
    """Answers every prompt with its own words; counts who asks how, and how many at once."""

    def __init__(self, says: Callable[[dict[str, Any]], str] = lambda _: "") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self.counts: dict[str, int] | None = COUNTS
        self.with_usage = True
        self._now = 0
        self._lock = threading.Lock()
        self._says = says

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "theirs"}]})
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self._answer(request)
        finally:
            with self._lock:
                self._now -= 1

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        with self._lock:
            self.bodies.append(body)
            self.paths.append(request.url.path)
        text = self._says(body) or str(body.get("prompt") or body["messages"][0]["content"])
        is_chat = request.url.path.endswith("/chat/completions")
        last: dict[str, Any] = {"completion_tokens": body["max_tokens"]}
        if self.counts:
            last["dspark"] = self.counts
        pieces = [{"delta": {"content": text}} if is_chat else {"text": text}]
        pieces.append({"finish_reason": "length"})
        chunks = [{"choices": [{"index": 0, **piece}]} for piece in pieces]
        tail = [{"choices": [], "usage": last}] if self.with_usage else []
        return events(*chunks, *tail, "[DONE]")

    def open(self, url: str) -> EndpointClient:
        return EndpointClient(url, transport=httpx.MockTransport(self))
