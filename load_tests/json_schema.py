"""Answers that must follow a JSON schema, drawn at temperature 1 with speculation on: is every one of them valid?

`.venv/bin/python -m load_tests.json_schema --requests 500 --seed 1`. Talks HTTP only; needs the `test` extra.
Every other request carries a seed, so both rules of acceptance are tried. The schemas bound whatever could go on for
ever, so an answer that ends by `length` is a fault, too. A run in which no draft token was accepted, or none refused,
tried nothing and fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from tqdm import tqdm

from load_tests.endpoint import api_of, health_of, served_model
from load_tests.prompts import NOUNS, TOPICS
from load_tests.soak import baseline_problems
from load_tests.sse import BrokenStreamError, EventReader, StreamRecord

MAX_TOKENS = 800
SHOWN_PROBLEMS = 20
MOST_RETRIES = 5


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_WORDS = {"type": "string", "minLength": 1, "maxLength": 40}
SCHEMAS: dict[str, dict[str, Any]] = {
    "fields": _object(
        name=_WORDS,
        age={"type": "integer", "minimum": 0, "maximum": 120},
        is_member={"type": "boolean"},
        # Without `multipleOf` a number may have digits for ever, and now and then has.
        score={"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.25},
    ),
    "choices": _object(
        size={"enum": ["small", "medium", "large", None, 0]},
        kind={"const": "order"},
        amount={"type": ["integer", "null"], "minimum": -99, "maximum": 99},
    ),
    "rows": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": _object(title=_WORDS, year={"type": "integer", "minimum": 1900, "maximum": 2100}),
    },
    "patterns": _object(
        code={"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{4}$"},
        date={"type": "string", "format": "date"},
        tags={"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    ),
    "either": {
        "anyOf": [
            _object(type={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 9}),
            _object(type={"const": "label"}, text=_WORDS),
        ]
    },
    "tree": {
        "$defs": {
            "leaf": _object(value={"type": "integer", "minimum": 0, "maximum": 999}),
            "branch": _object(
                left={"$ref": "#/$defs/leaf"},
                right={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
            ),
        },
        **_object(root={"$ref": "#/$defs/branch"}, note=_WORDS),
    },
    "optional": {
        "type": "object",
        "properties": {"city": _WORDS, "street": _WORDS, "zip": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request: which schema it must follow, what it asks for, and its seed (None: the rule of rejection)."""

    schema: str
    prompt: str
    seed: int | None

    def body(self, model: str) -> dict[str, Any]:
        format_ = {"name": self.schema, "schema": SCHEMAS[self.schema], "strict": True}
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_schema", "json_schema": format_},
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.seed is None else {"seed": self.seed}),
        }


def asks(count: int, seed: int) -> list[Ask]:
    """`count` requests, the schemas in turn, every prompt another; the same ones for the same seed."""
    rng, names = random.Random(seed), [*SCHEMAS]
    made = []
    for number in range(count):
        about = f"{rng.choice(NOUNS)} and {rng.choice(TOPICS)} (no. {rng.randrange(10**6)})"
        own_seed = rng.randrange(2**31) if number % 2 else None
        made.append(Ask(names[number % len(names)], f"Answer in JSON about {about}.", own_seed))
    return made


@dataclass
class Finding:
    """What a run came to."""

    valid: Counter[str] = field(default_factory=Counter)  # by schema
    invalid: Counter[str] = field(default_factory=Counter)
    cut: int = 0  # ended by the limit of tokens
    failed: int = 0  # no whole answer
    retried: int = 0  # refused for now, asked again
    completion_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def has_speculated(self) -> bool:
        return self.accepted_tokens > 0 and self.rejected_tokens > 0

    def take(self, ask: Ask, answer: StreamRecord) -> None:
        """Count one whole answer."""
        self.completion_tokens += answer.completion_tokens or 0
        self.accepted_tokens += answer.accepted_tokens
        self.rejected_tokens += answer.rejected_tokens
        text = "".join(answer.pieces)
        problem = f"ended by {answer.finish_reason}"
        if answer.finish_reason != "stop":
            self.cut += 1
        elif problem := problem_with(ask.schema, text):
            self.invalid[ask.schema] += 1
        else:
            self.valid[ask.schema] += 1
        if problem:
            self.problems.append(f"{problem}: {ask} {text[:300]!r}")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def problem_with(schema: str, text: str) -> str:
    """Why an answer is not what its schema asks for; empty where it is."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        return f"not JSON ({error})"
    checker = Draft202012Validator(
        SCHEMAS[schema], format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    return "; ".join(error.message for error in checker.iter_errors(value))


async def answered(
    client: httpx.AsyncClient, model: str, ask: Ask, finding: Finding
) -> StreamRecord:
    """The whole answer to one request, asked again when the server says so. Raises BrokenStreamError: there is none."""
    for _ in range(MOST_RETRIES):
        try:
            return await _streamed(client, model, ask)
        except RefusedForNowError as refusal:
            finding.retried += 1
            await asyncio.sleep(refusal.after_s)
    return await _streamed(client, model, ask)


class RefusedForNowError(BrokenStreamError):
    """Refused before the first token, with word of when to come again."""

    def __init__(self, text: str, after_s: float) -> None:
        super().__init__(text)
        self.after_s = after_s


async def _streamed(client: httpx.AsyncClient, model: str, ask: Ask) -> StreamRecord:
    record, reader = StreamRecord(ask.schema, time.monotonic()), EventReader()
    async with client.stream("POST", "/chat/completions", json=ask.body(model)) as response:
        if response.status_code != httpx.codes.OK:
            text = f"{response.status_code} {(await response.aread())[:300]!r}"
            after = response.headers.get("retry-after")
            if response.status_code in (429, 503) and after is not None:
                raise RefusedForNowError(text, float(after))
            raise BrokenStreamError(text)
        async for data in response.aiter_bytes():
            for event in reader.feed(data):
                record.take(event, time.monotonic())
    record.close()
    return record


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send all requests, `streams` at a time, and say what came of them."""
    finding, started = Finding(), time.monotonic()
    limits = httpx.Limits(max_connections=arguments.streams)
    async with httpx.AsyncClient(
        base_url=api_of(arguments.url), timeout=300.0, limits=limits
    ) as client:
        model = await served_model(client)
        waiting = iter(asks(arguments.requests, arguments.seed))
        with tqdm(total=arguments.requests, unit="answer", desc="json_schema", disable=None) as bar:

            async def work() -> None:
                for ask in waiting:
                    try:
                        finding.take(ask, await answered(client, model, ask, finding))
                    except (BrokenStreamError, httpx.HTTPError) as error:
                        finding.failed += 1
                        finding.problems.append(f"{type(error).__name__} {error}: {ask}")
                    bar.update()

            await asyncio.gather(*(work() for _ in range(arguments.streams)))
        health = health_of(arguments.url)
        try:
            left = await baseline_problems(client, health)
        except httpx.HTTPError as error:  # what was found all the same is told
            left = [f"{health} does not answer: {type(error).__name__}"]
    return report(finding, left, time.monotonic() - started)


def report(finding: Finding, left: list[str], seconds: float) -> dict[str, Any]:
    return {
        "ok": not finding.problems and not left and finding.has_speculated,
        "seconds": round(seconds, 1),
        "valid": finding.valid.total(),
        "invalid": finding.invalid.total(),
        "cut": finding.cut,
        "failed": finding.failed,
        "retried": finding.retried,
        "by_schema": {
            name: {"valid": finding.valid[name], "invalid": finding.invalid[name]}
            for name in SCHEMAS
        },
        "completion_tokens": finding.completion_tokens,
        "accepted_tokens": finding.accepted_tokens,
        "rejected_tokens": finding.rejected_tokens,
        "problems": finding.problems[:SHOWN_PROBLEMS],
        "baseline_problems": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="endpoint under test")
    parser.add_argument("--requests", type=int, default=500, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the same one makes the same requests")
    parser.add_argument("--streams", type=int, default=16, help="requests in flight")
    result = asyncio.run(run(parser.parse_args()))
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
