"""Reads a streamed answer as strictly as a client may."""

from __future__ import annotations

import json
from typing import Any

from tests.http.harness import CHAT, CHAT_PATH, TEXT, Server


class Reader:
    """Reads one SSE answer: its text, and the way it ended."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self.done = False
        self.usage: dict[str, Any] | None = None

    async def read(self, server: Server, until_chars: int | None = None, **body: Any) -> Reader:
        request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, **body}
        async with server.client.stream("POST", CHAT_PATH, json=request) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                self._take(line)
                if until_chars is not None and len(self.text) >= until_chars:
                    return self
        return self

    def _take(self, line: str) -> None:
        if not line or line.startswith(":"):  # a comment, while the stream waits
            return
        assert not self.done and self.error is None, f"{line} after the end"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self.usage = event["usage"]
        for choice in event["choices"]:
            self.text += choice["delta"].get("content", "")
            self.finish_reason = choice["finish_reason"]

    @property
    def is_whole(self) -> bool:
        """Every token of the script came once, in order, and the end was marked."""
        return self.done and self.error is None and self.text == TEXT
