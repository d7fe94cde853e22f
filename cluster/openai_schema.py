"""What all schemas of requests have in common: strictness, and numbers and texts as clients send them."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_NESTING = 100  # levels of a body; what reads or writes it again may take several calls a level


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    # No text is deeper than it has brackets, and counting them is quick; long prompts of token ids have hardly any.
    if isinstance(text, bytes):
        num_brackets = text.count(b"[") + text.count(b"{")
    else:
        num_brackets = text.count("[") + text.count("{")
    if num_brackets <= MAX_NESTING:
        return content
    level, depth = [content], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(_TOO_DEEP)
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
    return content


_TOO_DEEP = f"nested more than {MAX_NESTING} levels deep"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class Schema(BaseModel):
    """Unknown fields are accepted, as OpenAI-compatible servers do; `refuse_unsupported` looks at them afterwards."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _whole_number(value: object) -> object:
    # JavaScript clients write 1.0 where they mean 1.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def no_false(value: object) -> object:
    """Chat's way of asking for no log probabilities."""
    return None if value is False else value


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "half of a surrogate pair is no character; send whole characters"
        ) from error
    return text


Int = Annotated[int, BeforeValidator(_whole_number)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Text = Annotated[str, AfterValidator(_encodable)]
