"""What all schemas of requests have in common: strictness, and numbers and texts as clients send them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


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
