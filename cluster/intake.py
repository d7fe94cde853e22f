"""From a checked request to what the ranks need: prompt ids, lengths, sampling, stop rules."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.core.sampling import SamplingParams
from cluster.openai_api import (
    MAX_PROMPTS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DsparkOptions,
    GenerationRequest,
    bad_request,
)
from cluster.streams import StreamOrder, TextStream
from cluster.text import ChatTemplateError, TextCodec

COMPLETION_MAX_TOKENS = 16  # OpenAI's own default for /v1/completions
# No tokenizer here makes a token of more bytes on average; a longer prompt is refused before it is tokenised.
MAX_BYTES_PER_TOKEN = 64


@dataclass(frozen=True)
class IntakeLimits:
    """What the served model and its configuration allow."""

    model_name: str
    max_model_len: int  # prompt plus output, in tokens
    default_max_tokens: int  # of a chat that names no limit
    max_stop_strings: int
    classes: tuple[str, ...] = ()  # of service, as configured
    ranks: tuple[str, ...] = ()  # that a request may name; none unless rank hints are allowed


@dataclass(frozen=True)
class Job:
    """One prompt of a request: what to generate, and how its text is made."""

    order: StreamOrder
    stop_strings: tuple[str, ...]
    hidden_ids: frozenset[int]

    def text_stream(self, codec: TextCodec) -> TextStream:
        return TextStream(codec.detokenizer(), self.stop_strings, self.hidden_ids)


class Intake:
    """Makes jobs of requests, or refuses them with a typed 4xx before anything is allocated.

    Args:
        codec: the model's tokenizer and chat template.
        limits: what is allowed.
        draw_key: 64 random bits for a request without a seed.
    """

    def __init__(
        self,
        codec: TextCodec,
        limits: IntakeLimits,
        draw_key: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.codec = codec
        self.limits = limits
        self._draw_key = draw_key

    def jobs(
        self, request: GenerationRequest, response_id: str, traceparent: str | None
    ) -> list[Job]:
        """One job a prompt.

        Raises:
            ApiError: the request cannot be served as it is.
        """
        if isinstance(request, ChatRequest):
            return self.chat(request, response_id, traceparent)
        assert isinstance(request, CompletionRequest)
        return self.completion(request, response_id, traceparent)

    def chat(self, request: ChatRequest, response_id: str, traceparent: str | None) -> list[Job]:
        """The one job of a chat.

        Raises:
            ApiError: unknown model, messages the template refuses, or too long.
        """
        self._check(request)
        messages = [
            {"role": "system" if m.role == "developer" else m.role, "content": m.text}
            for m in request.messages
        ]
        try:
            prompt = self.codec.render_chat(messages, _template_arguments(request))
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        prompt_ids = self._tokenise("messages", prompt, add_special_tokens=False)
        wanted = request.max_completion_tokens or request.max_tokens
        limit = self._output_len(
            "messages", len(prompt_ids), wanted, self.limits.default_max_tokens
        )
        return [self._job(request, response_id, prompt_ids, limit, traceparent)]

    def completion(
        self, request: CompletionRequest, response_id: str, traceparent: str | None
    ) -> list[Job]:
        """One job a prompt.

        Raises:
            ApiError: unknown model, too many, empty or too long prompts, ids outside the vocabulary.
        """
        self._check(request)
        if not 1 <= len(request.prompts) <= MAX_PROMPTS:
            raise bad_request("prompt", request.prompt, f"give 1 to {MAX_PROMPTS} prompts")
        jobs = []
        for index, prompt in enumerate(request.prompts):
            prompt_ids: Sequence[int]
            if isinstance(prompt, str):
                prompt_ids = self._tokenise("prompt", prompt, add_special_tokens=True)
            else:
                prompt_ids = self._checked_ids("prompt", prompt)
            if not prompt_ids:
                raise bad_request(
                    "prompt", request.prompt, "an empty prompt has no token to go on from"
                )
            limit = self._output_len(
                "prompt", len(prompt_ids), request.max_tokens, COMPLETION_MAX_TOKENS
            )
            job_id = response_id if len(request.prompts) == 1 else f"{response_id}-{index}"
            jobs.append(self._job(request, job_id, prompt_ids, limit, traceparent))
        return jobs

    def _check(self, request: GenerationRequest) -> None:
        if request.model not in (None, self.limits.model_name):
            raise ApiError(
                404,
                f"model={request.model!r}: not served here; use {self.limits.model_name!r}",
                param="model",
                code="model_not_found",
            )
        stops = request.stop_strings
        if len(stops) > self.limits.max_stop_strings:
            raise bad_request(
                "stop", request.stop, f"give at most {self.limits.max_stop_strings} strings"
            )
        if not all(stops):
            raise bad_request(
                "stop", request.stop, "an empty string would stop at once; leave it out"
            )
        self._checked_ids("stop_token_ids", request.stop_token_ids or [])
        if request.dspark is not None:
            self._check_options(request.dspark)

    def _check_options(self, options: DsparkOptions) -> None:
        known, ranks = self.limits.classes, self.limits.ranks
        if options.service_class is not None and options.service_class not in known:
            remedy = f"known: {', '.join(known)}" if known else "no classes are configured"
            raise bad_request("dspark.class", options.service_class, f"{remedy}; or leave it out")
        if options.rank is not None and options.rank not in ranks:
            remedy = f"known: {', '.join(ranks)}" if ranks else "ingress.allow_rank_hint is off"
            raise bad_request("dspark.rank", options.rank, f"{remedy}; or leave it out")

    def _checked_ids(self, field: str, token_ids: Sequence[int]) -> Sequence[int]:
        for token_id in token_ids:
            if not 0 <= token_id < self.codec.vocab_size:
                raise bad_request(
                    field, token_id, f"token ids go from 0 to {self.codec.vocab_size - 1}"
                )
        return token_ids

    def _tokenise(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        longest = self.limits.max_model_len * MAX_BYTES_PER_TOKEN
        if len(text) > longest:
            raise ApiError(
                400,
                f"{field} holds {len(text)} characters, which cannot fit {self.limits.max_model_len} tokens; "
                "shorten it",
                param=field,
                code="context_length_exceeded",
            )
        try:
            return self.codec.encode(text, add_special_tokens=add_special_tokens)
        except (
            TypeError,
            UnicodeEncodeError,
        ) as error:  # half a surrogate pair, from template arguments
            raise ApiError(
                400, f"{field}: not encodable as UTF-8; send whole characters", param=field
            ) from error

    def _output_len(self, field: str, prompt_len: int, wanted: int | None, default: int) -> int:
        room = self.limits.max_model_len - prompt_len
        if room < (wanted or 1):
            asked = f" and {wanted} output tokens" if wanted else ""
            raise ApiError(
                400,
                f"this model's context holds {self.limits.max_model_len} tokens; {prompt_len} prompt tokens"
                f"{asked} do not fit; shorten {field} or ask for at most {max(room, 0)} output tokens",
                param=field,
                code="context_length_exceeded",
            )
        return wanted or min(default, room)

    def _job(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        traceparent: str | None,
    ) -> Job:
        own_stops = tuple(request.stop_token_ids or ())
        eos = () if request.ignore_eos else self.codec.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *own_stops)))
        options = request.dspark or DsparkOptions()
        named = options.service_class
        order = StreamOrder(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=max_new_tokens,
            sampling=self._sampling(request),
            stop_token_ids=stop_token_ids,
            traceparent=traceparent,
            class_id=0 if named is None else self.limits.classes.index(named),
            rank=options.rank,
            explain=options.explain,
        )
        return Job(order, request.stop_strings, self.codec.special_ids | set(stop_token_ids))

    def _sampling(self, request: GenerationRequest) -> SamplingParams:
        defaults = self.codec.default_sampling
        given = {
            name: defaults.get(name, fallback) if value is None else value
            for name, value, fallback in (
                ("temperature", request.temperature, 1.0),
                ("top_p", request.top_p, 1.0),
                ("top_k", request.top_k, 0),
            )
        }
        return SamplingParams(
            temperature=float(given["temperature"]),
            top_p=float(given["top_p"]),
            # -1 keeps all, in vLLM's words; so does more than there are, and ranks keep it in 32 bits.
            top_k=min(max(0, int(given["top_k"])), self.codec.vocab_size),
            seed=request.seed,
            noise_key=self._draw_key() if request.seed is None else request.seed,
            speculation=request.dspark is None or request.dspark.speculation,
        )


def _template_arguments(request: ChatRequest) -> dict[str, Any]:
    arguments = request.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt", "tools"):
        if name in arguments:
            raise bad_request(
                f"chat_template_kwargs.{name}", arguments[name], "set by the server; leave it out"
            )
    return arguments
