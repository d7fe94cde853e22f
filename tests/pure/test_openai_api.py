"""What the endpoints accept and refuse, field by field."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from actors.core.logit_rules import LogprobsOrder
from cluster.api_errors import ApiError
from cluster.openai_api import ChatRequest, CompletionRequest
from cluster.openai_parse import parse_request

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def refused(kind: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


BAD_FIELDS = [
    ("temperature", 2.5),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", True),
    ("seed", "7"),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("stop", 3),
    ("stop", ["a", 3]),
    ("stop", "\ud800"),
    ("stop_token_ids", ["a"]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("model", 5),
    ("dspark", {"speculation": "off"}),
    ("dspark", {"speculatoin": False}),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 1.5),
    ("best_of", 3),
    ("min_tokens", -1),
    ("max_completion_tokens", 0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", [1]),
    ("logprobs", "yes"),
    ("dspark", {"logprobs": "cooked"}),
    ("return_token_ids", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_bad_field_is_named_with_its_value(kind, field, value):
    request, base = (ChatRequest, CHAT) if kind == "chat" else (CompletionRequest, COMPLETION)
    error = refused(request, {**base, field: value})
    assert error.param is not None and re.split(r"[.\[]", error.param)[0] == field
    assert str(error).startswith(f"{error.param}=")
    body = error.body["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "f"),
        ("min_p", 0.1),
        ("echo", True),
        ("suffix", "x"),
        ("guided_json", {}),
        ("chat_template", "x"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(field, value):
    error = refused(ChatRequest, {**CHAT, field: value})
    assert error.param == field and error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        (ChatRequest, {"max_tokens": 9, "max_completion_tokens": 4, "min_tokens": 5}, "min_tokens"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CompletionRequest, {"logprobs": 21}, "logprobs"),
        (CompletionRequest, {"logprobs": True}, "logprobs"),
        (CompletionRequest, {"top_logprobs": 2}, "top_logprobs"),
        (CompletionRequest, {"echo": True, "logprobs": 0}, "logprobs"),
        (CompletionRequest, {"n": 2, "best_of": 4}, "best_of"),
        (CompletionRequest, {"suffix": "x"}, "suffix"),
        (ChatRequest, {"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens"),
        (ChatRequest, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        (ChatRequest, {"response_format": {"type": "xml"}}, "response_format.type"),
        (ChatRequest, {"structured_outputs": {"jason": {}}}, "structured_outputs.jason"),
        (ChatRequest, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ],
)
def test_fields_that_contradict_each_other_or_their_endpoint_are_named(kind, fields, param):
    error = refused(kind, {**(CHAT if kind is ChatRequest else COMPLETION), **fields})
    assert error.param == param and str(error).startswith(f"{param}=")


def test_orders_of_logprobs_in_both_shapes():
    def order(kind, body, **fields):
        return parse_request(kind, json.dumps({**body, **fields}).encode()).logprobs_order

    assert order(ChatRequest, CHAT) is None and order(ChatRequest, CHAT, logprobs=False) is None
    assert order(ChatRequest, CHAT, logprobs=True) == LogprobsOrder(0)
    assert order(ChatRequest, CHAT, logprobs=True, top_logprobs=3) == LogprobsOrder(3)
    assert order(CompletionRequest, COMPLETION, logprobs=0) == LogprobsOrder(0)
    processed = order(CompletionRequest, COMPLETION, logprobs=2, dspark={"logprobs": "processed"})
    assert processed == LogprobsOrder(2, "processed")


@pytest.mark.parametrize(
    "harmless",
    [
        {
            "n": 1,
            "logprobs": False,
            "presence_penalty": 0.0,
            "frequency_penalty": 0,
            "logit_bias": {},
        },
        {
            "logprobs": None,
            "tools": None,
            "response_format": {"type": "text"},
            "tool_choice": "none",
        },
        {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "unknown": [1],
        },
        {"max_tokens": 5.0, "top_k": -1, "stop": None, "stream": None, "temperature": 0},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_harmless_and_unknown_fields_are_accepted(harmless):
    parse_request(ChatRequest, json.dumps({**CHAT, **harmless}).encode())
    parse_request(CompletionRequest, json.dumps({**COMPLETION, **harmless}).encode())


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "oracle", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "x"}]}],
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_bad_messages_are_named(messages, param):
    assert refused(ChatRequest, {**CHAT, "messages": messages}).param == param


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, ["a", 1], [[1], "a"], [1.5], [True]])
def test_bad_prompts_are_named_with_the_remedy(prompt):
    error = refused(CompletionRequest, {**COMPLETION, "prompt": prompt})
    assert error.param == "prompt" and "list of token ids" in str(error)


def test_missing_fields_are_named():
    assert refused(ChatRequest, {"model": "m"}).param == "messages"
    assert refused(CompletionRequest, {"model": "m"}).code == "missing_field"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}']
)
def test_what_is_not_a_json_object_is_refused(body):
    with pytest.raises(ApiError) as caught:
        parse_request(ChatRequest, body)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


def test_a_long_value_is_shortened_in_the_message():
    error = refused(ChatRequest, {**CHAT, "temperature": "x" * 10_000})
    assert len(str(error)) < 200


def test_prompts_and_stops_have_one_form_behind_the_schema():
    def prompts(prompt: Any) -> Any:
        return list(
            parse_request(
                CompletionRequest, json.dumps({**COMPLETION, "prompt": prompt}).encode()
            ).prompts
        )

    assert prompts("a") == ["a"] and prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]] and prompts([[1], [2]]) == [[1], [2]]
    chat = parse_request(ChatRequest, json.dumps({**CHAT, "stop": "x"}).encode())
    assert chat.stop_strings == ("x",)


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}]}
    assert parse_request(ChatRequest, json.dumps(body).encode()).messages[0].text == "ab"
