"""`response_format` and `structured_outputs` as one grammar in the language of llguidance. Knows nothing of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import BeforeValidator, ConfigDict, Field

from actors.engine.grammars import limits
from cluster.api_errors import ApiError, bad_request
from cluster.json_formats import with_real_days
from cluster.openai_schema import Schema, Text, read_json

MAX_GRAMMAR_BYTES = 256 * 2**10
# One space, or a new line with its indentation: a model that may write any space writes spaces for ever.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ ]|\n {0,32}"}


class JsonSchemaFormat(Schema):
    """OpenAI's named schema. `strict` or not, it is always kept to."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _schema_of_text(value: object) -> object:
    # vLLM's clients send a schema as text, too.
    return read_json(value) if isinstance(value, str) else value


class StructuredOutputs(Schema):
    """vLLM's name for the rest: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(_schema_of_text)] = Field(
        None, alias="json"
    )
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = Field(None, min_length=1)
    grammar: Text | None = None  # Lark, as llguidance reads it


Trial = Callable[[str], str]
"""Why nothing can be written by a grammar; empty where something can (`grammar_trial`)."""


def grammar_of(
    format_: ResponseFormat | None, outputs: StructuredOutputs | None, trial: Trial
) -> str:
    """The grammar that an answer must follow; empty without one.

    Raises:
        ApiError: 400 for contradicting fields, 422 for a schema, regex or grammar that cannot be followed.
    """
    if outputs is not None:
        if format_ is not None and format_.type != "text":
            raise bad_request("structured_outputs", "…", "leave it or response_format out")
        name = _only_output(outputs)
        return checked_grammar(f"structured_outputs.{name}", lambda: _of_outputs(outputs), trial)
    if format_ is None or format_.type == "text":
        return ""
    if format_.type == "json_object":
        return checked_grammar("response_format", lambda: of_schema({"type": "object"}), trial)
    if format_.json_schema is None:
        raise ApiError(
            400,
            "response_format.json_schema: this field is required with type json_schema",
            param="response_format.json_schema",
            code="missing_field",
        )
    schema = format_.json_schema.json_schema
    return checked_grammar("response_format.json_schema.schema", lambda: of_schema(schema), trial)


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of the JSON values that a schema allows.

    Raises:
        ValueError: the schema holds what JSON cannot carry: half a surrogate pair, or a number beyond 64 bits.
    """
    return str(LLMatcher.grammar_from_json_schema(with_real_days(schema), overrides=JSON_OPTIONS))


def _only_output(outputs: StructuredOutputs) -> str:
    given = outputs.model_dump(exclude_none=True, by_alias=True)
    if len(given) != 1 or outputs.json_object is False:
        raise bad_request(
            "structured_outputs",
            sorted(given),
            "give exactly one of json, json_object, regex, choice, grammar",
        )
    if outputs.choice is not None and not all(outputs.choice):
        raise bad_request("structured_outputs.choice", outputs.choice, "no choice may be empty")
    return next(iter(given))


def _of_outputs(outputs: StructuredOutputs) -> str:
    if outputs.json_object:
        return of_schema({"type": "object"})
    if outputs.json_schema is not None:
        return of_schema(outputs.json_schema)
    if outputs.choice is not None:
        return of_choice(outputs.choice)
    if outputs.regex is not None:
        return str(LLMatcher.grammar_from_regex(outputs.regex))
    assert outputs.grammar is not None
    return str(LLMatcher.grammar_from_lark(outputs.grammar))


def of_choice(choices: list[str]) -> str:
    """The grammar of exactly these texts."""
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return str(LLMatcher.grammar_from_lark(f"start: {words}"))


def checked_grammar(field: str, make: Callable[[], str], trial: Trial) -> str:
    """The grammar that `make` returns, when it can be followed.

    Raises:
        ApiError: 422, naming the field it came from.
    """
    try:
        grammar = make()
    except ValueError as error:
        raise ApiError(
            422,
            f"{field}: cannot be read by the grammar library ({str(error)[:100]}); send whole characters, and numbers "
            "of at most 64 bits",
            param=field,
            code="invalid_grammar",
        ) from error
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise ApiError(
            422,
            f"{field}: larger than {MAX_GRAMMAR_BYTES} bytes; simplify it",
            param=field,
            code="grammar_too_large",
        )
    problem = LLMatcher.validate_grammar(grammar, None, limits=limits())
    if not problem or problem.startswith("WARNING"):
        problem = trial(grammar)
    if problem:
        raise ApiError(
            422,
            f"{field}: cannot be followed: {problem.strip()}; change it",
            param=field,
            code="invalid_grammar",
        )
    return grammar
