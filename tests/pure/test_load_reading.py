"""How the load tests read a stream: whatever the network's cuts, tokens from usage, broken streams named."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.sse import BrokenStreamError, EventReader, StreamRecord

EVENTS = ['{"a": 1}', "[DONE]", '{"text": "é\\n"}']


def wire(*events: str, newline: str = "\n") -> bytes:
    return "".join(f"data: {event}{newline}{newline}" for event in events).encode()


def piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def usage(tokens: int, **details: int) -> str:
    counts: dict[str, Any] = {"completion_tokens": tokens, "completion_tokens_details": details}
    return json.dumps({"choices": [], "usage": counts})


@given(st.lists(st.integers(0, 60), max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int], newline: str) -> None:
    data = b": keep-alive\n\n" + wire(*EVENTS, newline=newline)
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    reader = EventReader()
    found = [e for a, b in pairwise(edges) for e in reader.feed(data[a:b])]
    assert found == EVENTS


def test_times_are_taken_from_text_and_tokens_from_usage() -> None:
    record = StreamRecord("chat", started_s=10.0)
    for data, now in [
        (piece(""), 10.1),
        (piece("a b"), 10.5),
        (piece("c"), 12.5),
        (piece("d"), 13.0),
    ]:
        record.take(data, now)
    record.take(usage(6, accepted_prediction_tokens=3, rejected_prediction_tokens=2), 13.1)
    record.take("[DONE]", 13.1)
    record.close()
    assert (record.ttft_s, record.max_gap_s, record.completion_tokens) == (0.5, 2.0, 6)
    assert record.tpot_s == pytest.approx(2.5 / 5)
    assert (record.accepted_tokens, record.rejected_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([piece("a"), usage(1)], "without \\[DONE\\]"),
        ([piece("a"), "[DONE]"], "no usage"),
        (['{"error": {"message": "gone"}}'], "gone"),
    ],
)
def test_a_stream_that_ends_wrongly_is_refused(events: list[str], message: str) -> None:
    record = StreamRecord("chat", started_s=0.0)
    with pytest.raises(BrokenStreamError, match=message):  # noqa: PT012 - either call may find it
        for event in events:
            record.take(event, 1.0)
        record.close()


def test_an_aborted_stream_needs_neither_end_nor_usage() -> None:
    record = StreamRecord("chat", started_s=0.0, aborted=True)
    record.take(piece("a"), 1.0)
    record.close()
    assert record.tpot_s is None
