"""How a model writes tool calls: one class a way of writing, chosen by `ingress.tool_parser`.

A parser sees text in pieces, as a stream brings it. What it finds depends on the whole text alone, never on how it was
cut: a call is handed on when its end has come, and text that may still become one is held.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from cluster.openai_schema import read_json
from cluster.structured_output import JSON_OPTIONS


@dataclass(frozen=True)
class Call:
    """One call the model asks for; `arguments` is JSON, as OpenAI's clients expect it."""

    name: str
    arguments: str


Found = str | Call  # ordinary text, or a call


class ToolParser(Protocol):
    """One answer's parser.

    Attributes:
        names: functions that exist; what calls another is text.
    """

    def __init__(self, names: frozenset[str]) -> None: ...

    def feed(self, text: str) -> list[Found]:
        """What has become certain with this piece."""
        ...

    def finish(self) -> list[Found]:
        """The answer is over."""
        ...

    @staticmethod
    def grammar(calls: Sequence[dict[str, Any]], *, many: bool) -> str:
        """Lark, for llguidance: one of the calls, whose JSON schemas are given, or any number of them from one on."""
        ...

    @staticmethod
    def write(call: Call) -> str:
        """An earlier call, as the model would have written it."""
        ...


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write; text may stand before it."""

    OPEN: ClassVar[str] = "<tool_call>"
    CLOSE: ClassVar[str] = "</tool_call>"

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_after_call = False

    def feed(self, text: str) -> list[Found]:
        self._held += text
        found: list[Found] = []
        while self._held:
            start = self._held.find(self.OPEN)
            if start < 0:
                found += self._text(len(self._held) - _overlap(self._held, self.OPEN))
                break
            found += self._text(start)
            end = self._held.find(self.CLOSE)
            if end < 0:
                break
            written = self._held[: end + len(self.CLOSE)]
            self._held = self._held[len(written) :]
            call = _call_of(written[len(self.OPEN) : end], self._names)
            found.append(written if call is None else call)
            self._is_after_call = call is not None
        return [one for one in found if one]

    def finish(self) -> list[Found]:
        found = self._text(len(self._held))
        return [one for one in found if one]

    def _text(self, length: int) -> list[Found]:
        text, self._held = self._held[:length], self._held[length:]
        if self._is_after_call:  # the line ends between calls are nobody's words
            text = text.lstrip()
            self._is_after_call = not text
        return [text]

    @staticmethod
    def grammar(calls: Sequence[dict[str, Any]], *, many: bool) -> str:
        open_, close = json.dumps(HermesParser.OPEN + "\n"), json.dumps("\n" + HermesParser.CLOSE)
        repeated = '\nstart: call ("\\n" call)*' if many else "\nstart: call"
        return f"%llguidance {{}}{repeated}\ncall: {open_} object {close}\n{_objects(calls)}"

    @staticmethod
    def write(call: Call) -> str:
        return f"{HermesParser.OPEN}\n{_written(call)}\n{HermesParser.CLOSE}"


class JsonParser:
    """An answer that is nothing but `{"name": …, "arguments": {…}}`, or a list of them."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Found]:
        self._held += text
        begin = self._held.lstrip()[:1]
        self._is_text = self._is_text or bool(begin and begin not in "{[")
        return self._release() if self._is_text else []

    def finish(self) -> list[Found]:
        if self._is_text:
            return self._release()
        try:
            value = read_json(self._held)
        except ValueError:
            return self._release()
        calls = [
            _checked(one, self._names) for one in (value if isinstance(value, list) else [value])
        ]
        if not calls or None in calls:
            return self._release()
        return [call for call in calls if call is not None]

    def _release(self) -> list[Found]:
        text, self._held = self._held, ""
        return [text] if text else []

    @staticmethod
    def grammar(calls: Sequence[dict[str, Any]], *, many: bool) -> str:
        start = 'start: "[" object (", " object)* "]"' if many else "start: object"
        return f"%llguidance {{}}\n{start}\n{_objects(calls)}"

    @staticmethod
    def write(call: Call) -> str:
        return _written(call)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "json": JsonParser}


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may become the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def _call_of(text: str, names: frozenset[str]) -> Call | None:
    try:
        return _checked(read_json(text), names)
    except ValueError:
        return None


def _checked(value: object, names: frozenset[str]) -> Call | None:
    """A call of a function that exists; None for anything else."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError:  # 1e999, or half a surrogate pair: no client could read it again
        return None
    return Call(name, written)


def _written(call: Call) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'


def _objects(calls: Sequence[dict[str, Any]]) -> str:
    schema = dict(calls[0]) if len(calls) == 1 else {"anyOf": list(calls)}
    # The library heeds its options at the root only.
    return f"object: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}\n"
