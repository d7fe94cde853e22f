"""`dspark explain ID`: why each round of a request was verified as far as it was, one line a round."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cluster.client import EndpointClient
from cluster.commands.control import require_running
from cluster.console import emit_json, say, table

COLUMNS = [
    "step", "token", "survivals", "sent", "accepted", "cut by", "K", "price", "decided by", "with",
]  # fmt: skip
LEGEND = (
    "survivals: one bar a draft token, the probability that it and those before it are accepted; what stands before "
    "│ was sent to the target. K: draft tokens for the whole step. with: rounds that shared the step."
)
_BARS = "▁▂▃▄▅▆▇█"
_UNLIMITED = 2**31 - 1


def explain(arguments: argparse.Namespace) -> int:
    url = arguments.url or require_running(arguments.state).endpoint
    with EndpointClient(url, key_file=arguments.api_key_file) as client:
        found = client.explain(arguments.id)
    if arguments.json:
        emit_json(found)
    else:
        say("\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> Iterator[str]:
    choices = found["choices"]
    for choice in choices:
        if len(choices) > 1:
            yield f"prompt {choice['index']}"
        if choice["num_lost_tokens"]:
            yield f"the rounds behind {choice['num_lost_tokens']} tokens went with their rank"
        for segment in choice["segments"]:
            yield _heading(segment)
            yield table(COLUMNS, [_row(each) for each in segment["rounds"]])
            yield ""
    if found["unanswered"]:
        yield f"did not answer: {', '.join(found['unanswered'])}"
    yield LEGEND


def _heading(segment: dict[str, Any]) -> str:
    total, kept = segment["num_rounds"], len(segment["rounds"])
    which = f"{total} rounds" if kept == total else f"the last {kept} of {total} rounds"
    state = "ended" if segment["has_ended"] else "running"
    return f"{segment['rank']}: {which}, from token {segment['first_index']} on, {state}"


def _row(each: dict[str, Any]) -> list[str]:
    unlimited = each["max_draft_tokens"] >= _UNLIMITED
    return [
        str(each["step"]),
        str(each["first_index"]),
        _bars(each),
        str(each["num_scheduled"]),
        str(each["num_accepted"]),
        "explored" if each["explored"] else each["cut_by"],
        "any" if unlimited else str(each["max_draft_tokens"]),
        f"{each['min_survival']:.2f}",
        each["rule"],
        str(each["num_requests"] - 1),
    ]


def _bars(each: dict[str, Any]) -> str:
    """Survivals as bars, cut where verification stopped; a dash where there was no block."""
    if not each["num_proposed"]:
        return "-"
    bars = [_BARS[min(int(a * len(_BARS)), len(_BARS) - 1)] for a in each["survivals"]]
    sent = each["num_scheduled"]
    return "".join([*bars[:sent], "│", *bars[sent:]])
