"""Tool calls in text: found whatever way the text is cut, and only where they are well formed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.tool_parsers import PARSERS, Call, Found, HermesParser

NAMES = frozenset({"add", "now"})
ADD, NOW = Call("add", '{"a": 1, "b": "é"}'), Call("now", "{}")


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


GOOD_NOW = call('{"name": "now"}')
GOOD_ADD = call('\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n')
# What a client could not read again, or what would stop the reader: text.
NO_CALLS = (
    '{"name": []}',
    '{"name": "now", "arguments": {"a": NaN}}',
    '{"name": "now", "arguments": {"a": 1e999}}',
    '{"name": "now", "arguments": {"a": "\\ud800"}}',
    '{"name": "now", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001,
)
HERMES: list[tuple[str, list[Found]]] = [
    *((call(text), [call(text)]) for text in NO_CALLS),
    ("no call at all < here", ["no call at all < here"]),
    (GOOD_ADD, [ADD]),
    (f"Let me see.\n{GOOD_ADD}", ["Let me see.\n", ADD]),
    (f"{GOOD_ADD}\n{GOOD_NOW}\n ", [ADD, NOW]),
    (f"{GOOD_ADD} and then", [ADD, "and then"]),
    (call('{"name": "now", "parameters": {}}'), [NOW]),
    (call("not json"), [call("not json")]),
    (call('{"name": "unknown", "arguments": {}}'), [call('{"name": "unknown", "arguments": {}}')]),
    (call('{"name": "now", "arguments": "x"}'), [call('{"name": "now", "arguments": "x"}')]),
    (call('["now"]'), [call('["now"]')]),
    ("<tool_call>{", ["<tool_call>{"]),
    ("<tool_cal", ["<tool_cal"]),
    ("a<<tool_call", ["a<<tool_call"]),
    ("", []),
]
JSON: list[tuple[str, list[Found]]] = [
    *((text, [text]) for text in NO_CALLS),
    (' {"name": "add", "arguments": {"a": 1, "b": "é"}}', [ADD]),
    (
        '[{"name": "now", "parameters": {}}, {"name": "add", "arguments": {"a": 1, "b": "é"}}]',
        [NOW, ADD],
    ),
    ("Plain {text}", ["Plain {text}"]),
    ('{"name": "unknown"}', ['{"name": "unknown"}']),
    ('{"name": "now"', ['{"name": "now"']),
    ("[]", ["[]"]),
    ("[1]", ["[1]"]),
    ("  ", ["  "]),
]
CASES = [("hermes", *case) for case in HERMES] + [("json", *case) for case in JSON]


def parsed(parser: str, pieces: Sequence[str]) -> list[Found]:
    """What is found, with neighbouring texts joined: where a text is cut is nobody's business."""
    reader = PARSERS[parser](NAMES)
    joined: list[Found] = []
    found = [one for piece in pieces for one in reader.feed(piece)] + reader.finish()
    for one in found:
        if isinstance(one, str) and joined and isinstance(joined[-1], str):
            joined[-1] += one
        else:
            joined.append(one)
    return joined


@pytest.mark.parametrize(("parser", "text", "found"), CASES)
def test_calls_and_text_of_a_whole_answer(parser: str, text: str, found: list[Found]) -> None:
    assert parsed(parser, [text]) == found
    assert parsed(parser, list(text)) == found


fragments = st.sampled_from(
    [
        GOOD_ADD,
        call("x"),
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "\n",
        " ",
        "text",
        "{",
        "}",
    ]
)


@settings(deadline=None)
@given(
    parts=st.lists(fragments, max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    parser=st.sampled_from(sorted(PARSERS)),
)
def test_a_text_parses_the_same_however_it_is_cut(
    parts: list[str], cuts: list[int], parser: str
) -> None:
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    assert parsed(parser, pieces) == parsed(parser, [text]) == parsed(parser, list(text))


def test_a_call_is_handed_on_as_soon_as_it_has_ended() -> None:
    reader = HermesParser(NAMES)
    assert reader.feed("Well, ") == ["Well, "]
    assert reader.feed(GOOD_ADD[:-1]) == []
    assert reader.feed(">") == [ADD]


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_what_a_parser_writes_it_reads(parser: str) -> None:
    assert parsed(parser, [PARSERS[parser].write(ADD)]) == [ADD]
    assert json.loads(ADD.arguments) == {"a": 1, "b": "é"}
