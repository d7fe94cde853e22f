"""Requests that a fuzzer sends: what /openapi.json allows and forbids, plausible ones, and bytes that are no request.

Half of them come from schemathesis, by the document of the server itself; the others start from a request that a client
might send, so that many reach the ranks, and are then spoilt. The same seed makes the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

Hangup = Literal["", "in body", "in answer"]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True)
class Attempt:
    """One request, as bytes, and when its client leaves."""

    method: str
    path: str  # percent-encoded
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hangup: Hangup = ""
    made: str = "plain"

    @property
    def shown(self) -> str:
        """For a report: enough to send it again by hand."""
        body = b"" if self.body is None else self.body
        text = f"{body[:2000]!r}" + (f" … {len(body)} bytes" if len(body) > 2000 else "")
        return f"[{self.made}] {self.method} {self.path} {self.headers} {self.hangup} {text}"


def attempts(document: dict[str, Any], model: str, count: int, seed: int) -> Iterator[Attempt]:
    """`count` requests for the server that /openapi.json `document` is of."""
    rng = random.Random(seed)
    described = described_requests(document, count * 2 // 5, seed)
    for _ in range(count):
        draw = rng.random()
        attempt = next(described, None) if draw < 0.4 else None
        if attempt is None:
            attempt = plausible(rng, model)
        yield spoilt(rng, attempt) if rng.random() < 0.4 else attempt


# --- by the document --------------------------------------------------------------------------------------------------


def described_requests(document: dict[str, Any], count: int, seed: int) -> Iterator[Attempt]:
    """Requests as the document allows and as it forbids them, operations in turn, made in small portions."""
    makers: list[Callable[[int, int], list[Attempt]]] = []
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.POSITIVE or operation.body:
                makers.append(_maker(operation.as_strategy(generation_mode=mode), mode.name))
    portion, made = max(1, min(40, count // len(makers) + 1)), 0
    while made < count:
        for index, maker in enumerate(makers):
            found = maker(portion, seed * 1_000_003 + made + index)
            made += len(found)
            yield from found


def _maker(strategy: Any, mode: str) -> Callable[[int, int], list[Attempt]]:
    def make(count: int, seed: int) -> list[Attempt]:
        found: list[Attempt] = []

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def collect(case: Any) -> None:
            found.append(_attempt_of(case, mode))

        collect()
        return found[:count]

    return make


def _attempt_of(case: Any, mode: str) -> Attempt:
    body: bytes | None = None
    if isinstance(case.body, bytes):
        body = case.body
    elif case.media_type is not None:
        body = json.dumps(case.body).encode()
    headers = JSON_HEADERS if body is not None else {}
    return Attempt(case.method.upper(), case.formatted_path, body, headers, made=mode.lower())


# --- plausible ones ---------------------------------------------------------------------------------------------------

WORDS = ("hello", "the fox", "a b c", "ünï", "日本", "🏳️‍🌈", " ", "\n", "x" * 40, '{"a": 1}')
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
FIELDS: dict[str, Sequence[Any]] = {
    "temperature": (0, 0.7, 1, 2.0),
    "top_p": (1, 0.5, 0.01),
    "top_k": (-1, 0, 1, 20, 10**9),
    "seed": (0, 7, -1, 2**63 - 1),
    "stop": ("e", ["a", "the"], "zz"),
    "stop_token_ids": ([2], [5, 6, 7], []),
    "ignore_eos": (True, False),
    "max_completion_tokens": (1, 9, 30),
    "min_tokens": (0, 3),
    "n": (1, 2, 4),
    "presence_penalty": (0.5, -2),
    "frequency_penalty": (1.5, 0),
    "repetition_penalty": (1.2, 0.5),
    "logit_bias": ({"5": 3}, {"7": -100, "8": 100}),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        {"type": "text"},
    ),
    "structured_outputs": ({"regex": "[a-f]+"}, {"choice": ["yes", "no"]}, {"json": SCHEMA}),
    "return_token_ids": (True,),
    "priority": (0, -5, 9),
    "user": ("somebody",),
    "dspark": ({"speculation": False}, {"explain": True}, {"logprobs": "processed"}),
    "metadata": ({"nobody": "reads it"},),  # unknown to us: ignored
}
CHAT_FIELDS: dict[str, Sequence[Any]] = {
    "logprobs": (True,),
    "top_logprobs": (0, 3),
    "tools": ([TOOL],),
    "tool_choice": ("auto", "required", "none"),
    "chat_template_kwargs": ({"enable_thinking": False}, {"x": [1]}),
}
COMPLETION_FIELDS: dict[str, Sequence[Any]] = {"logprobs": (0, 2), "echo": (True, False)}


def plausible(rng: random.Random, model: str) -> Attempt:
    """A request that a client might send; most of them are valid."""
    path = rng.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, COMPLETIONS, "/tokenize"))
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
    messages = [{"role": rng.choice(("system", "user", "assistant")), "content": text}]
    if path == "/tokenize":
        body: dict[str, Any] = rng.choice(({"prompt": text}, {"messages": messages}))
        return Attempt("POST", path, json.dumps(body).encode(), JSON_HEADERS)
    body = {"model": model, "max_tokens": rng.randint(1, 24)}
    own = CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS
    if path == CHAT:
        body["messages"] = messages * rng.randint(1, 3)
    else:
        body["prompt"] = rng.choice((text, [text, text], [5, 6, 7], [[9], [8, 9]]))
    for name, values in {**FIELDS, **own}.items():
        if rng.random() < 0.1:
            body[name] = rng.choice(values)
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    return Attempt("POST", path, json.dumps(body).encode(), JSON_HEADERS)


# --- spoilt ones ------------------------------------------------------------------------------------------------------

# Written as JSON text, because some of it is no JSON.
STRANGE = (
    "null", "true", "-1", "0", "1e999", "-1e999", "NaN", "Infinity", "1.5", "1e308", "-0.0",
    "9" * 400, "9" * 5000, str(2**31), str(2**63), str(2**64), '""', '"\\ud800"', '"\\u0000"',
    '"' + "é" * 3000 + '"', '"%s%n{{7*7}}"', "[]", "{}", "[[]]", "[null]", "[1,\"a\"]",
    "[" * 60 + "]" * 60, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000,
    '{"type": "json_schema"}', '{"" : {}}', '[' + "1," * 3000 + "1]", '{"$ref": "#"}',
    '{"' + "9" * 5000 + '": 1}', '{"json": "' + "[" * 3000 + '"}', '{"regex": "(a{1,999}){1,999}"}',
    '{"grammar": "start: start"}', '{"json": {"$ref": "#"}}', '{"choice": ["\\ud800"]}',
    '{"json": {"enum": [1e999]}}', '{"json": {"maximum": ' + "9" * 400 + "}}", '"\\u2028\\udfff"',
    '{"type":"json_schema","json_schema":{"schema":{"pattern":"(?=a)"}}}',
    '{"type":"json_schema","json_schema":{"schema":{"enum":["\\ud800"]}}}',
    "[" * 300 + "]" * 300, "[" * 900 + "]" * 900, '{"a":' * 950 + "1" + "}" * 950, '"user"',
    '[{"role":"user","content":"\\ud800"}]', '[{"role":"tool","content":[{"type":"text","text":""}]}]',
)  # fmt: skip
KNOWN = (
    *FIELDS, *CHAT_FIELDS, *COMPLETION_FIELDS, "model", "messages", "prompt", "max_tokens", "stream",
    "stream_options", "best_of", "parallel_tool_calls", "suffix", "tokens", "add_special_tokens",
    "return_token_strs", "",
)  # fmt: skip
CONTENT_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-16", "application/xml", "*/*", "",
)  # fmt: skip
HEADERS = (
    {"authorization": "Bearer \xff"}, {"authorization": "Basic " + "A" * 3000}, {"traceparent": "00-x-y-z"},
    {"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"}, {"accept": "text/event-stream"},
    {"accept-encoding": "gzip;q=nonsense"}, {"content-encoding": "gzip"}, {"cookie": "a" * 5000},
    {"origin": "http://["}, {"origin": "null"}, {"origin": "http://elsewhere.example"},
    {"x-request-id": "\x7f" * 50}, {"expect": "100-continue"},
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST")
PATHS = (
    "/", "//", "/v1", "/v1/chat", "/v1/models/%00", "/v1/models/%ff", "/v1/requests//explain", "/dashboard/..%2f",
    "/dashboard/x", "/v1/requests/%F0%9F%98%80/explain", "/dashboard/rounds/1", "/dashboard/state",
)  # fmt: skip


def spoilt(rng: random.Random, attempt: Attempt) -> Attempt:
    """The same with something wrong about its bytes, headers, path, or with a client that leaves."""
    ways = (
        _cut,
        _flipped,
        _strange,
        _strange,
        _strange,
        _typed,
        _headed,
        _leaving,
        _leaving,
        _moved,
    )
    return rng.choice(ways)(rng, attempt)


def _cut(rng: random.Random, attempt: Attempt) -> Attempt:
    body = attempt.body or b""
    return replace(attempt, body=body[: rng.randrange(len(body) + 1)], made="cut")


def _flipped(rng: random.Random, attempt: Attempt) -> Attempt:
    body = bytearray(attempt.body or b"{}")
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return replace(attempt, body=bytes(body), made="flipped")


def _strange(rng: random.Random, attempt: Attempt) -> Attempt:
    """Strange values in place of some, anywhere in the body, or as fields of their own."""
    try:
        content = json.loads(attempt.body or b"{}")
    except (ValueError, RecursionError):
        content = {}
    content = content if isinstance(content, dict) else {}
    texts = {}
    for i in range(rng.choice((1, 1, 1, 2, 4))):
        texts[f"strange-{i}"] = rng.choice(STRANGE)
        places = list(_places(content))
        if rng.random() < 0.5 or not places:
            content[rng.choice(KNOWN)] = f"strange-{i}"
        else:
            node, key = rng.choice(places)
            node[key] = f"strange-{i}"
    body = json.dumps(content)
    for name, text in texts.items():
        body = body.replace(f'"{name}"', text)
    return replace(attempt, body=body.encode(), made="strange")


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield node, key
            yield from _places(child)


def _typed(rng: random.Random, attempt: Attempt) -> Attempt:
    headers = {**attempt.headers, "content-type": rng.choice(CONTENT_TYPES)}
    return replace(attempt, headers=headers, made="typed")


def _headed(rng: random.Random, attempt: Attempt) -> Attempt:
    return replace(attempt, headers={**attempt.headers, **rng.choice(HEADERS)}, made="headed")


def _leaving(rng: random.Random, attempt: Attempt) -> Attempt:
    hangup: Hangup = rng.choice(("in body", "in answer"))
    return replace(attempt, hangup=hangup, made="leaving")


def _moved(rng: random.Random, attempt: Attempt) -> Attempt:
    if rng.random() < 0.5:
        return replace(attempt, method=rng.choice(METHODS), made="moved")
    return replace(attempt, path=rng.choice(PATHS), made="moved")
