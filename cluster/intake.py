"""From a checked request to what the ranks need: prompt ids, lengths, sampling, stop rules."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actors.core.sampling import SamplingParams
from cluster.api_errors import ApiError, bad_request
from cluster.chat_messages import template_messages
from cluster.grammar_trial import GrammarTrial
from cluster.jobs import IntakeLimits, Job
from cluster.openai_api import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    DsparkOptions,
    GenerationRequest,
    TokenizeRequest,
)
from cluster.request_sampling import rules_of, sampling_of
from cluster.streams import StreamOrder
from cluster.text import ChatTemplateError, TextCodec
from cluster.tools import forced_grammar, tool_use

COMPLETION_MAX_TOKENS = 16  # OpenAI's own default for /v1/completions
# No tokenizer here makes a token of more bytes on average; a longer prompt is refused before it is tokenised.
MAX_BYTES_PER_TOKEN = 64

Prompt = tuple[Sequence[int], str]  # its token ids, and the text shown before the answer


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
        self.grammars = GrammarTrial(codec)
        self._draw_key = draw_key

    def jobs(
        self, request: GenerationRequest, response_id: str, traceparent: str | None
    ) -> list[Job]:
        """One job a choice: those of the first prompt, then those of the next.

        Raises:
            ApiError: the request cannot be served as it is.
        """
        self._check(request)
        if isinstance(request, ChatRequest):
            prompts: list[Prompt] = [(self.chat_prompt(request), "")]
            field, default_len = "messages", self.limits.default_max_tokens
        else:
            assert isinstance(request, CompletionRequest)
            prompts = self._completion_prompts(request)
            field, default_len = "prompt", COMPLETION_MAX_TOKENS
        trial = self.grammars.problem
        rules = rules_of(request, self.codec, trial, self._forced_grammar(request))
        num_jobs = len(prompts) * request.num_choices
        jobs: list[Job] = []
        num_tokens = 0
        for prompt_ids, echo in prompts:
            limit = self._output_len(field, len(prompt_ids), request, default_len)
            if (request.min_tokens or 0) > limit:
                raise bad_request(
                    "min_tokens", request.min_tokens, f"at most {limit} output tokens are possible"
                )
            num_tokens += request.num_choices * (len(prompt_ids) + limit)
            for choice in range(request.num_choices):
                job_id = response_id if num_jobs == 1 else f"{response_id}-{len(jobs)}"
                sampling = sampling_of(request, self.codec, rules, self._draw_key(), choice)
                order = self._order(request, job_id, prompt_ids, limit, sampling)
                jobs.append(
                    self._job(request, replace(order, traceparent=traceparent), choice, echo)
                )
        self._check_total(request, num_tokens)
        return jobs

    def _forced_grammar(self, request: GenerationRequest) -> str:
        if not (isinstance(request, ChatRequest) and request.demands_call):
            return ""
        assert request.tool_choice is not None
        many = request.parallel_tool_calls is not False
        parser = self.limits.tool_parser
        tools, choice, trial = request.offered_tools, request.tool_choice, self.grammars.problem
        return forced_grammar(tools, choice, parser, trial, many=many)

    def chat_prompt(self, request: ChatRequest | TokenizeRequest) -> list[int]:
        """The token ids that the chat template makes of the messages.

        Raises:
            ApiError: messages the template refuses, or too long.
        """
        tools = request.offered_tools if isinstance(request, ChatRequest) else []
        codec, arguments = self.codec, _template_arguments(request)
        messages = template_messages(
            request.messages or (), tools, self.limits.tool_parser, knows_tools=codec.knows_tools
        )
        if tools and codec.knows_tools:
            arguments = {**arguments, "tools": [t.model_dump(exclude_none=True) for t in tools]}
        try:
            prompt = codec.render_chat(messages, arguments)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        return self._tokenise("messages", prompt, add_special_tokens=False)

    def _completion_prompts(self, request: CompletionRequest) -> list[Prompt]:
        if not 1 <= len(request.prompts) <= MAX_PROMPTS:
            raise bad_request("prompt", request.prompt, f"give 1 to {MAX_PROMPTS} prompts")
        prompts: list[Prompt] = []
        for prompt in request.prompts:
            prompt_ids: Sequence[int]
            if isinstance(prompt, str):
                prompt_ids, text = self.tokenise_prompt(prompt), prompt
            else:
                prompt_ids = self.checked_ids("prompt", prompt)
                text = self.codec.decode(prompt_ids) if request.echo else ""
            if not prompt_ids:
                raise bad_request(
                    "prompt", request.prompt, "an empty prompt has no token to go on from"
                )
            prompts.append((prompt_ids, text if request.echo else ""))
        return prompts

    def tokenise_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            ApiError: it cannot fit.
        """
        return self._tokenise("prompt", text, add_special_tokens=add_special_tokens)

    def check_model(self, name: str | None) -> None:
        """One model is served.

        Raises:
            ApiError: 404 for another one.
        """
        if name not in (None, self.limits.model_name):
            raise ApiError(
                404,
                f"model={name!r}: not served here; use {self.limits.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _check(self, request: GenerationRequest) -> None:
        self.check_model(request.model)
        if request.num_choices > self.limits.max_choices:
            raise bad_request("n", request.n, f"at most {self.limits.max_choices} choices")
        stops = request.stop_strings
        if len(stops) > self.limits.max_stop_strings:
            raise bad_request(
                "stop", request.stop, f"give at most {self.limits.max_stop_strings} strings"
            )
        if not all(stops):
            raise bad_request(
                "stop", request.stop, "an empty string would stop at once; leave it out"
            )
        self.checked_ids("stop_token_ids", request.stop_token_ids or [])
        if request.dspark is not None:
            self._check_options(request.dspark)

    def _check_options(self, options: DsparkOptions) -> None:
        known, ranks = self.limits.classes, self.limits.ranks
        if options.service_class is not None and options.service_class not in known:
            remedy = f"known: {', '.join(known)}" if known else "no classes are configured"
            raise bad_request("dspark.class", options.service_class, f"{remedy}; leave it out")
        if options.rank is not None and options.rank not in ranks:
            remedy = f"known: {', '.join(ranks)}" if ranks else "ingress.allow_rank_hint is off"
            raise bad_request("dspark.rank", options.rank, f"{remedy}; leave it out")

    def _check_total(self, request: GenerationRequest, num_tokens: int) -> None:
        if num_tokens > self.limits.max_request_tokens:
            field = "n" if request.num_choices > 1 else "prompt"
            raise ApiError(
                400,
                f"{field}: all choices together may take {num_tokens} tokens, prompts included, and one request at "
                f"most {self.limits.max_request_tokens}; ask for fewer choices or a smaller max_tokens",
                param=field,
                code="request_too_large",
            )

    def checked_ids(self, field: str, token_ids: Sequence[int]) -> Sequence[int]:
        """The ids themselves.

        Raises:
            ApiError: one of them is no token.
        """
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

    def _output_len(
        self, field: str, prompt_len: int, request: GenerationRequest, default: int
    ) -> int:
        room, wanted = self.limits.max_model_len - prompt_len, request.output_limit
        if room < (wanted or 1):
            asked = f" and {wanted} output tokens" if wanted else ""
            remedy = f"shorten {field}"
            if room > 0:
                remedy = f"ask for at most {room} output tokens, or {remedy}"
            raise ApiError(
                400,
                f"this model's context holds {self.limits.max_model_len} tokens; {prompt_len} prompt tokens"
                f"{asked} do not fit; {remedy}",
                param=field if room < 1 else request.limit_field,
                code="context_length_exceeded",
            )
        return wanted or min(default, room)

    def _order(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingParams,
    ) -> StreamOrder:
        eos = () if request.ignore_eos else self.codec.eos_token_ids
        options = request.dspark or DsparkOptions()
        named = options.service_class
        return StreamOrder(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_token_ids=tuple(dict.fromkeys((*eos, *(request.stop_token_ids or ())))),
            priority=request.priority or 0,
            class_id=0 if named is None else self.limits.classes.index(named),
            rank=options.rank,
            explain=options.explain,
            provenance=options.provenance,
        )

    def _job(self, request: GenerationRequest, order: StreamOrder, choice: int, echo: str) -> Job:
        return Job(
            order,
            request.stop_strings,
            self.codec.special_ids | set(order.stop_token_ids),
            is_first_choice=choice == 0,
            shows_ids=bool(request.return_token_ids),
            echo=echo,
            tools=tool_use(
                request.offered_tools, request.tool_choice or "auto", self.limits.tool_parser
            )
            if isinstance(request, ChatRequest)
            else None,
        )


def _template_arguments(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    arguments = request.chat_template_kwargs or {}
    for name in ("messages", "add_generation_prompt", "tools"):
        if name in arguments:
            raise bad_request(
                f"chat_template_kwargs.{name}", arguments[name], "set by the server; leave it out"
            )
    return arguments
