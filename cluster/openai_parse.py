"""From the bytes of a body to a checked request: what is refused, and in whose words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from cluster.api_errors import ApiError, bad_request, shown
from cluster.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from cluster.openai_schema import Schema, read_json
from cluster.tools import NamedChoice

# --- features that would change the output and that we do not have ----------------------------------------------------


def _always(_: object) -> bool:
    return True


def _other_than(*harmless: object) -> Callable[[object], bool]:
    return lambda value: value not in harmless


_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "top_logprobs": (_other_than(0), "completions take logprobs as a number; use that"),
    "prompt_logprobs": (_always, "log probabilities of the prompt are not available; leave it out"),
    "tools": (_other_than([]), "only chats have tools; leave it out"),
    "tool_choice": (_other_than("none", "auto"), "only chats have tools; leave it out"),
    "functions": (_other_than([]), "use tools and tool_choice"),
    "function_call": (
        _other_than("none", "auto"),
        "use tools and tool_choice",
    ),
    "guided_json": (_always, "use structured_outputs.json"),
    "guided_regex": (_always, "use structured_outputs.regex"),
    "guided_choice": (_always, "use structured_outputs.choice"),
    "guided_grammar": (_always, "use structured_outputs.grammar"),
    "modalities": (_other_than(["text"]), "only text is available; leave it out"),
    "audio": (_always, "only text is available; leave it out"),
    "min_p": (_other_than(0), "not available; use 0, or top_p"),
    "echo": (_other_than(False), "only /v1/completions repeats the prompt; use false"),
    "suffix": (_other_than(""), "text cannot be filled in before a suffix; leave it out"),
    "use_beam_search": (_other_than(False), "beam search is not available; use false"),
    "include_stop_str_in_output": (_other_than(False), "not available; use false"),
    "skip_special_tokens": (_other_than(True), "special tokens are never shown; use true"),
    "continue_final_message": (_other_than(False), "not available; use /v1/completions"),
    "add_generation_prompt": (_other_than(True), "not available; use /v1/completions"),
    "chat_template": (_always, "the model's own chat template is used; leave it out"),
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
    "tool_choice": 'give none, auto, required or {"type": "function", "function": {"name": "…"}}',
    "content": 'give a string or a list of {"type": "text", "text": "…"} parts',
}

SchemaT = TypeVar("SchemaT", bound=Schema)


def parse_request(kind: type[SchemaT], body: bytes) -> SchemaT:
    """A checked request.

    Raises:
        ApiError: 400 naming the first bad field, its value and the remedy.
    """
    try:
        content = read_json(body)
    except ValueError as error:
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
    if isinstance(request, ChatRequest | TokenizeRequest):  # elsewhere, messages is any other word
        for index, message in enumerate(request.messages or ()):
            refuse_unsupported(message.model_extra, f"messages[{index}].")
    if isinstance(request, GenerationRequest):
        _check_together(request)
    return request


def _check_together(request: GenerationRequest) -> None:
    """Fields that are fine alone and contradict each other."""
    if request.stream_options is not None and not request.stream:
        raise bad_request(
            "stream_options", request.stream_options.model_dump(), "only with stream=true"
        )
    if request.dspark is not None and request.dspark.provenance and not request.stream:
        raise bad_request("dspark.provenance", True, "only with stream=true")
    if request.best_of not in (None, request.num_choices):
        raise bad_request("best_of", request.best_of, "all choices are returned; use n")
    limit = request.output_limit
    if limit is not None and (request.min_tokens or 0) > limit:
        raise bad_request("min_tokens", request.min_tokens, f"at most max_tokens, which is {limit}")
    if isinstance(request, ChatRequest):
        _check_tools(request)
    if request.is_guided or (isinstance(request, ChatRequest) and request.demands_call):
        for name, value in (("min_tokens", request.min_tokens), ("ignore_eos", request.ignore_eos)):
            if value:
                raise bad_request(name, value, "an answer with a format ends where the format does")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs", request.top_logprobs, "only with logprobs=true")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request(
            "logprobs",
            request.logprobs,
            "those of an echoed prompt are not available; leave one out",
        )


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools or ()]
    if len(set(names)) < len(names):
        raise bad_request("tools", names, "two functions have the same name; rename one")
    choice = request.tool_choice
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        name = choice.function.name
        raise bad_request("tool_choice.function.name", name, "no function of tools has this name")
    if choice == "required" and not names:
        raise bad_request("tool_choice", choice, "give the tools that can be called")
    if request.demands_call and request.is_guided:
        raise bad_request(
            "tool_choice", "…", "a call has its own format; leave response_format out"
        )


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
