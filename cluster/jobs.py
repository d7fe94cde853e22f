"""What intake makes of a request: one job a choice."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.streams import StreamOrder, TextStream
from cluster.text import TextCodec
from cluster.tools import ToolUse


@dataclass(frozen=True)
class IntakeLimits:
    """What the served model and its configuration allow."""

    model_name: str
    max_model_len: int  # prompt plus output, in tokens
    default_max_tokens: int  # of a chat that names no limit
    max_stop_strings: int
    classes: tuple[str, ...] = ()  # of service, as configured
    ranks: tuple[str, ...] = ()  # that a request may name; none unless rank hints are allowed
    max_choices: int = 16
    max_request_tokens: int = 131072  # of all choices together, prompts included
    tool_parser: str = "hermes"


@dataclass(frozen=True)
class Job:
    """One choice of a request: what to generate, and how its text is made."""

    order: StreamOrder
    stop_strings: tuple[str, ...]
    hidden_ids: frozenset[int]
    is_first_choice: bool = True  # of its prompt, which counts once however many choices it gets
    shows_ids: bool = False
    echo: str = ""  # text shown before the answer
    tools: ToolUse | None = None  # how calls in the answer are read

    @property
    def shows_tokens(self) -> bool:
        """Whether the client sees more of tokens than their text."""
        return self.shows_ids or self.order.sampling.logprobs is not None

    def text_stream(self, codec: TextCodec) -> TextStream:
        rules = self.order.sampling.rules
        min_tokens = 0 if rules is None else rules.min_tokens
        return TextStream(codec.detokenizer(), self.stop_strings, self.hidden_ids, min_tokens)
