"""One streamed answer as a careful client reads it: events from bytes, times from a clock, tokens from usage.

Pure: bytes and clock readings in, a `StreamRecord` out. A chunk says nothing about tokens (several may share one,
and one may be split), so tokens come from `usage` and from nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class BrokenStreamError(RuntimeError):
    """The stream carried an error event, ended without [DONE], or without usage."""


@dataclass
class EventReader:
    """Splits a byte stream into the data of server-sent events, wherever the network cut it."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the data of every event that `data` completes."""
        self._rest = (self._rest + data).replace(b"\r\n", b"\n")
        *whole, self._rest = self._rest.split(b"\n\n")
        return [text for event in whole if (text := _data_of(event)) is not None]


def _data_of(event: bytes) -> str | None:
    """Return the joined data lines; None for a comment or a keep-alive."""
    lines = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines).decode() if lines else None


@dataclass
class StreamRecord:
    """What one stream was like; times in seconds on the caller's clock."""

    tenant: str
    started_s: float
    first_s: float | None = None  # first text
    last_s: float | None = None
    max_gap_s: float = 0.0  # longest wait between two texts
    completion_tokens: int | None = None
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    aborted: bool = False
    pieces: list[str] = field(default_factory=list)

    def take(self, data: str, now_s: float) -> None:
        """Fold one event.

        Raises:
            BrokenStreamError: the event is an error.
        """
        if data == "[DONE]":
            self.done = True
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise BrokenStreamError(json.dumps(event["error"]))
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            if text:
                self._saw_text(text, now_s)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        usage = event.get("usage")
        if usage:
            self.completion_tokens = int(usage["completion_tokens"])
            details = usage.get("completion_tokens_details") or {}
            self.accepted_tokens = int(details.get("accepted_prediction_tokens") or 0)
            self.rejected_tokens = int(details.get("rejected_prediction_tokens") or 0)

    def _saw_text(self, text: str, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        if self.last_s is not None:
            self.max_gap_s = max(self.max_gap_s, now_s - self.last_s)
        self.last_s = now_s
        self.pieces.append(text)

    def close(self) -> None:
        """Check that the stream ended as it must.

        Raises:
            BrokenStreamError: no [DONE], or no usage.
        """
        if not self.aborted and not self.done:
            raise BrokenStreamError("the stream ended without [DONE]")
        if not self.aborted and self.completion_tokens is None:
            raise BrokenStreamError("the stream carried no usage")

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for one token or an aborted stream."""
        if self.completion_tokens is None or self.completion_tokens < 2:
            return None
        if self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.completion_tokens - 1)
