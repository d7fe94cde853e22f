"""The OpenAI-compatible answers: whole, or in chunks of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from cluster.streams import SpeculationCounts

DONE_EVENT = b"data: [DONE]\n\n"


# Line ends to Unicode, so to clients that split text and not bytes; JSON itself would leave them as they are.
_LINE_ENDS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})


def sse_event(content: dict[str, Any]) -> bytes:
    """One server-sent event, on one line whatever its text."""
    line = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if not line.isascii():
        line = line.translate(_LINE_ENDS)
    return f"data: {line}\n\n".encode()


def usage_of(
    num_prompt_tokens: int,
    num_cached_tokens: int,
    num_completion_tokens: int,
    counts: SpeculationCounts,
) -> dict[str, Any]:
    """OpenAI's usage, with ours beside it. Rejected = scheduled − accepted: trimming is not rejection."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": counts.num_accepted,
            "rejected_prediction_tokens": counts.num_scheduled - counts.num_accepted,
        },
        "dspark": {
            "num_rounds": counts.num_rounds,
            "num_proposed": counts.num_proposed,
            "num_scheduled": counts.num_scheduled,
            "num_accepted": counts.num_accepted,
        },
    }


Details = Mapping[str, Any]  # fields of a choice about its tokens: log probabilities, ids
NOTHING: Details = MappingProxyType({})


@dataclass(frozen=True)
class WholeChoice:
    """One finished choice."""

    text: str
    finish_reason: str
    details: Details = field(default_factory=dict)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """Of a chat. With calls and without words, its content is null."""
        content = None if self.tool_calls and not self.text else self.text
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": self.tool_calls} if self.tool_calls else message


@dataclass(frozen=True)
class Envelope:
    """What all chunks of one response have in common."""

    kind: Literal["chat", "completion"]
    response_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str
    include_usage: bool = False  # then every chunk carries the field, null until the last

    def role_chunk(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat: who speaks."""
        return self._chunk(
            [self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)]
        )

    def text_chunk(self, index: int, text: str, details: Details = NOTHING) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self.kind == "chat" else {"text": text}
        return self._chunk([self._choice(index, content, None, details)])

    def calls_chunk(self, index: int, first: int, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Tool calls, whole; the first of them has the number `first` in the answer."""
        shown = [{"index": first + number, **call} for number, call in enumerate(calls)]
        return self._chunk([self._choice(index, {"delta": {"tool_calls": shown}}, None)])

    def finish_chunk(self, index: int, finish_reason: str) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.kind == "chat" else {"text": ""}
        return self._chunk([self._choice(index, content, finish_reason)])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def whole(self, choices: list[WholeChoice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        shown = [
            self._choice(
                index,
                {"message": choice.message} if self.kind == "chat" else {"text": choice.text},
                choice.finish_reason,
                choice.details,
            )
            for index, choice in enumerate(choices)
        ]
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": shown, "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        chunk = {**self._head(name), "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    @staticmethod
    def _choice(
        index: int, content: dict[str, Any], finish_reason: str | None, details: Details = NOTHING
    ) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": finish_reason,
            **details,
        }
