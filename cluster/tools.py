"""Tools of a chat: what a request may offer, how the model is told, and what it must then write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.openai_schema import Schema, Text
from cluster.structured_output import Trial, checked_grammar
from cluster.tool_parsers import PARSERS, Call, ToolParser


class FunctionSpec(Schema):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Schema):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Schema):
    name: str


class NamedChoice(Schema):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Schema):
    name: str
    arguments: Text = "{}"


class ToolCall(Schema):
    """A call in the history of a chat."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True)
class ToolUse:
    """How the answer to one request is read."""

    parser: type[ToolParser]
    names: frozenset[str]
    is_named: bool = (
        False  # one function was demanded by name: OpenAI ends such an answer with "stop"
    )

    def reader(self) -> ToolParser:
        return self.parser(self.names)


def tool_use(tools: Sequence[Tool], choice: str | NamedChoice, parser: str) -> ToolUse | None:
    """None where no call can come."""
    if not tools or choice == "none":
        return None
    names = frozenset(tool.function.name for tool in tools)
    return ToolUse(PARSERS[parser], names, isinstance(choice, NamedChoice))


def forced_grammar(
    tools: Sequence[Tool], choice: str | NamedChoice, parser: str, trial: Trial, *, many: bool
) -> str:
    """The grammar of an answer that must be a call; empty where the model decides.

    Raises:
        ApiError: 422, the parameters of a function are no usable schema.
    """
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice != "required":
        return ""
    calls = [_call_schema(tool.function) for tool in tools]
    one_only = isinstance(choice, NamedChoice) or not many
    return checked_grammar(
        "tools", lambda: PARSERS[parser].grammar(calls, many=not one_only), trial
    )


def _call_schema(function: FunctionSpec) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def described(tools: Sequence[Tool]) -> str:
    """What a model whose template knows nothing of tools is told, in the words Hermes models were trained on."""
    lines = [json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools]
    return (
        "You can call these functions, given by their JSON schemas:\n<tools>\n"
        + "\n".join(lines)
        + "\n</tools>\nTo call one, answer with\n"
        + '<tool_call>\n{"name": "FUNCTION", "arguments": {…}}\n</tool_call>'
    )


def written_calls(calls: Sequence[ToolCall], parser: str) -> str:
    """Earlier calls as text, for a template that knows nothing of them."""
    write = PARSERS[parser].write
    return "\n".join(write(Call(c.function.name, c.function.arguments)) for c in calls)
