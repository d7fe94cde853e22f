"""The OpenAI-compatible requests: what is accepted, what is refused, and in whose words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

MAX_SHOWN_VALUE = 80  # characters of a bad value repeated to the client
MAX_PROMPTS = 128


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
        kind = {429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error"}
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(field: str, value: object, remedy: str, code: str = "invalid_value") -> ApiError:
    """400 that names the field, the value and the remedy."""
    return ApiError(400, f"{field}={shown(value)}: {remedy}", param=field, code=code)


def shown(value: object) -> str:
    """The value as JSON, shortened; lone surrogates stay escaped."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= MAX_SHOWN_VALUE else text[: MAX_SHOWN_VALUE - 1] + "…"


# --- schemas ----------------------------------------------------------------------------------------------------------


class Schema(BaseModel):
    """Unknown fields are accepted, as OpenAI-compatible servers do; `refuse_unsupported` looks at them afterwards."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _whole_number(value: object) -> object:
    # JavaScript clients write 1.0 where they mean 1.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "half of a surrogate pair is no character; send whole characters"
        ) from error
    return text


Int = Annotated[int, BeforeValidator(_whole_number)]
Text = Annotated[str, AfterValidator(_encodable)]


class StreamOptions(Schema):
    include_usage: bool | None = None


class DsparkOptions(BaseModel):
    """Our extension; misspelt fields are refused, because nobody else defines them."""

    model_config = ConfigDict(strict=True, extra="forbid")
    speculation: bool = True
    service_class: str | None = Field(None, alias="class")
    rank: str | None = None  # only where `ingress.allow_rank_hint` is set
    explain: bool = False  # keep why its rounds were verified as far as they were


class GenerationRequest(Schema):
    """What both endpoints share."""

    model: str | None = None  # one model is served, so it may go unnamed
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Int | None = Field(None, ge=-1)
    seed: Int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    max_tokens: Int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    dspark: DsparkOptions | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Schema):
    type: Literal["text"]
    text: Text


class ChatMessage(Schema):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    prompt: Text | list[Text] | list[Int] | list[list[Int]]

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # one prompt, already tokenised
        return cast("list[str] | list[list[int]]", self.prompt)


# --- features that would change the output and that we do not have ----------------------------------------------------


def _always(_: object) -> bool:
    return True


def _other_than(*harmless: object) -> Callable[[object], bool]:
    return lambda value: value not in harmless


_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "n": (_other_than(1), "only one choice per request; send several requests"),
    "best_of": (_other_than(1), "only one choice per request; send several requests"),
    "logprobs": (
        lambda value: value is not False,
        "log probabilities are not available; leave it out",
    ),
    "top_logprobs": (_other_than(0), "log probabilities are not available; leave it out"),
    "prompt_logprobs": (_always, "log probabilities are not available; leave it out"),
    "tools": (_other_than([]), "tool calls are not available; leave it out"),
    "tool_choice": (_other_than("none", "auto"), "tool calls are not available; leave it out"),
    "functions": (_other_than([]), "function calls are not available; leave it out"),
    "function_call": (
        _other_than("none", "auto"),
        "function calls are not available; leave it out",
    ),
    "response_format": (
        _other_than({"type": "text"}),
        "only plain text is available; leave it out",
    ),
    "structured_outputs": (_always, "only plain text is available; leave it out"),
    "guided_json": (_always, "only plain text is available; leave it out"),
    "guided_regex": (_always, "only plain text is available; leave it out"),
    "guided_choice": (_always, "only plain text is available; leave it out"),
    "guided_grammar": (_always, "only plain text is available; leave it out"),
    "modalities": (_other_than(["text"]), "only text is available; leave it out"),
    "audio": (_always, "only text is available; leave it out"),
    "logit_bias": (_other_than({}), "logits cannot be biased; leave it out"),
    "presence_penalty": (_other_than(0), "penalties are not available; use 0"),
    "frequency_penalty": (_other_than(0), "penalties are not available; use 0"),
    "repetition_penalty": (_other_than(1), "penalties are not available; use 1"),
    "min_p": (_other_than(0), "not available; use 0, or top_p"),
    "min_tokens": (_other_than(0), "not available; use 0"),
    "echo": (_other_than(False), "the prompt cannot be repeated in the answer; use false"),
    "suffix": (_other_than(""), "text cannot be filled in before a suffix; leave it out"),
    "use_beam_search": (_other_than(False), "beam search is not available; use false"),
    "include_stop_str_in_output": (_other_than(False), "not available; use false"),
    "skip_special_tokens": (_other_than(True), "special tokens are never shown; use true"),
    "continue_final_message": (_other_than(False), "not available; use /v1/completions"),
    "add_generation_prompt": (_other_than(True), "not available; use /v1/completions"),
    "chat_template": (_always, "the model's own chat template is used; leave it out"),
    "tool_calls": (_other_than([]), "tool calls are not available; leave it out"),
}


def refuse_unsupported(extra: dict[str, Any] | None, where: str = "") -> None:
    """Refuse, by name, fields that would change the output; a null is as good as nothing."""
    for name, value in (extra or {}).items():
        rule = _REFUSED.get(name)
        if rule is not None and value is not None and rule[0](value):
            raise bad_request(where + name, value, rule[1], code="unsupported_parameter")


# --- parsing ----------------------------------------------------------------------------------------------------------

# Where several forms are accepted, pydantic would name only the first.
_BRANCHES = {
    "stop": "give a string or a list of strings",
    "prompt": "give a string, a list of strings, a list of token ids, or a list of such lists",
    "content": 'give a string or a list of {"type": "text", "text": "…"} parts',
}

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """A checked request.

    Raises:
        ApiError: 400 naming the first bad field, its value and the remedy.
    """
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"the body is not JSON ({error}); send one JSON object", code="invalid_json"
        ) from error
    if not isinstance(content, dict):
        raise ApiError(400, f"body={shown(content)}: send one JSON object", code="invalid_json")
    try:
        request = kind.model_validate(content)
    except ValidationError as error:
        raise _first_problem(error) from error
    refuse_unsupported(request.model_extra)
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            refuse_unsupported(message.model_extra, f"messages[{index}].")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", content["stream_options"], "only with stream=true")
    return request


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False)[0]
    field = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif re.fullmatch(r"[a-z_]+", part) and part not in ("str", "int"):
            field += f".{part}" if field else part
        else:
            break  # what follows names pydantic's branches, not the client's fields
    if problem["type"] == "missing":
        return ApiError(400, f"{field}: this field is required", param=field, code="missing_field")
    remedy = _BRANCHES.get(field.rpartition(".")[2].partition("[")[0], problem["msg"])
    return bad_request(field, problem["input"], remedy)
