"""The OpenAI-compatible requests, field by field. `cluster.openai_parse` makes them of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from actors.core.logit_rules import LogprobsOrder
from cluster.openai_schema import Bias, Int, Schema, Text, no_false
from cluster.structured_output import ResponseFormat, StructuredOutputs
from cluster.tools import NamedChoice, Tool, ToolCall

MAX_PROMPTS = 128
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128


class StreamOptions(Schema):
    include_usage: bool | None = None


class DsparkOptions(BaseModel):
    """Our extension; misspelt fields are refused, because nobody else defines them."""

    model_config = ConfigDict(strict=True, extra="forbid")
    speculation: bool = True
    service_class: str | None = Field(None, alias="class")
    rank: str | None = None  # only where `ingress.allow_rank_hint` is set
    explain: bool = False  # keep why its rounds were verified as far as they were
    # Of the model's own distribution, or of the one that is sampled from.
    logprobs: Literal["raw", "processed"] = "raw"
    provenance: bool = False  # say of each token of a stream where it comes from


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
    max_completion_tokens: Int | None = Field(None, ge=1)  # the newer name; it wins
    min_tokens: Int | None = Field(None, ge=0)
    n: Int | None = Field(None, ge=1)
    best_of: Int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Bias] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    priority: Int | None = Field(None, ge=-(2**31), le=2**31 - 1)  # vLLM's: lower starts earlier
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
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field that `output_limit` comes from."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def is_guided(self) -> bool:
        """Whether a grammar says what the answer may be."""
        plain = self.response_format is None or self.response_format.type == "text"
        return self.structured_outputs is not None or not plain

    @property
    def num_top_logprobs(self) -> int | None:
        """How many alternatives beside each token's own log probability; None asks for no log probabilities."""
        raise NotImplementedError

    @property
    def logprobs_order(self) -> LogprobsOrder | None:
        num_top = self.num_top_logprobs
        of: Literal["raw", "processed"] = "raw" if self.dspark is None else self.dspark.logprobs
        return None if num_top is None else LogprobsOrder(num_top, of)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Schema):
    type: Literal["text"]
    text: Text


class ChatMessage(Schema):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """Those that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def demands_call(self) -> bool:
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    prompt: Text | list[Text] | list[Int] | list[list[Int]]
    logprobs: Annotated[Int | None, BeforeValidator(no_false)] = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS
    )
    echo: bool | None = None

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # one prompt, already tokenised
        return cast("list[str] | list[list[int]]", self.prompt)


class TokenizeRequest(Schema):
    """Of a prompt, or of what the chat template makes of messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None  # of a prompt; left out: true
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Schema):
    model: str | None = None
    tokens: list[Int]
