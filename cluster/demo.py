"""`dspark demo`: the same prompts with speculation on and off, through the HTTP endpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.client import Answer, EndpointClient, collect
from cluster.commands.local import local_cluster
from cluster.console import dim, emit_json, note, say, table
from cluster.demo_prompts import PROMPTS
from cluster.run_state import find

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Pair:
    """One prompt answered twice, greedily: with speculation and without."""

    kind: str
    prompt: str
    dspark: Answer
    none: Answer

    @property
    def equal(self) -> bool:
        return (self.dspark.text, self.dspark.finish_reason) == (
            self.none.text,
            self.none.finish_reason,
        )


def demo(arguments: argparse.Namespace) -> int:
    running = find(Path(arguments.state))
    if running is not None and running.phase == "ready":
        note(f"using the running cluster at {running.endpoint} ({running.numerics})")
        report = summary(_measure(running.endpoint, arguments), running.numerics)
        want_fast = bool(arguments.fast) and running.numerics != "fast"
    else:
        with local_cluster(arguments, "model.numerics=reproducible") as endpoint:
            report = summary(_measure(endpoint, arguments), "reproducible")
        want_fast = arguments.fast is not False
    if want_fast:
        with local_cluster(arguments, "model.numerics=fast") as endpoint:
            fast = summary(_measure(endpoint, arguments), "fast")
        report["fast"] = {**fast["tokens_per_s"], "greedy_equal": fast["greedy_equal"]}
    _print(report, to=note if arguments.json else say)
    broken = report["numerics"] == "reproducible" and not report["greedy_equal"]
    if broken:
        note("greedy texts differ, though reproducible numerics promise that they do not")
    if arguments.json:
        emit_json(report)
    return int(broken)


def summary(pairs: Sequence[Pair], numerics: str) -> dict[str, Any]:
    """The report of one run; rates are Σ tokens / Σ seconds, acceptance Σ committed / Σ rounds."""
    rounds = sum(pair.dspark.num_rounds for pair in pairs)
    accepted = sum(pair.dspark.num_accepted for pair in pairs)
    return {
        "numerics": numerics,
        "acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "greedy_equal": all(pair.equal for pair in pairs),
        "tokens_per_s": {
            "dspark": _rate(pair.dspark for pair in pairs),
            "none": _rate(pair.none for pair in pairs),
        },
        "prompts": [_row(pair) for pair in pairs],
    }


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "kind": pair.kind,
        "acceptance_length": pair.dspark.acceptance_length,
        "tokens": pair.dspark.completion_tokens,
        "equal": pair.equal,
        "tokens_per_s": {"dspark": pair.dspark.tokens_per_s, "none": pair.none.tokens_per_s},
    }


def _rate(answers: Iterable[Answer]) -> float:
    kept = list(answers)
    seconds = sum(answer.elapsed_s for answer in kept)
    return sum(answer.completion_tokens for answer in kept) / seconds if seconds else 0.0


def _measure(endpoint: str, arguments: argparse.Namespace) -> list[Pair]:
    """Every prompt twice. Which way goes first alternates, so that neither profits from a warm cache."""
    pairs = []
    num_predict = arguments.num_predict
    with EndpointClient(endpoint, key_file=arguments.api_key_file) as client:
        model = client.choose_model(None)
        for speculation in (True, False):
            _ask(client, model, "Hello!", WARM_UP_TOKENS, speculation, show=lambda _: None)
        for number, (kind, prompt) in enumerate(PROMPTS):
            note(f"\n[{kind}] {prompt}")
            answers: dict[bool, Answer] = {}
            for speculation in (True, False) if number % 2 == 0 else (False, True):
                show = _live if speculation else (lambda _: None)
                answers[speculation] = _ask(client, model, prompt, num_predict, speculation, show)
            pairs.append(Pair(kind, prompt, answers[True], answers[False]))
            note(_verdict(pairs[-1]))
    return pairs


def _ask(
    client: EndpointClient,
    model: str,
    prompt: str,
    num_predict: int,
    speculation: bool,
    show: Callable[[str], None],
) -> Answer:
    messages = [{"role": "user", "content": prompt}]
    stream = client.stream_chat(
        model, messages, speculation=speculation, temperature=0, max_tokens=num_predict
    )
    return collect(stream, show)


def _live(text: str) -> None:
    note(dim(text), end="")


def _verdict(pair: Pair) -> str:
    return (
        f"\n→ {pair.dspark.tokens_per_s:.1f} tokens/s with DSpark, {pair.none.tokens_per_s:.1f} without; "
        f"{pair.dspark.acceptance_length:.2f} tokens a round; "
        f"greedy texts {'equal' if pair.equal else 'DIFFER'}"
    )


def _print(report: dict[str, Any], to: Callable[[str], None]) -> None:
    rows = [
        [
            row["kind"],
            str(row["tokens"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_s']['dspark']:.1f}",
            f"{row['tokens_per_s']['none']:.1f}",
            "yes" if row["equal"] else "NO",
        ]
        for row in report["prompts"]
    ]
    rates = report["tokens_per_s"]
    tokens = sum(row["tokens"] for row in report["prompts"])
    rows.append(
        [
            "total",
            str(tokens),
            f"{report['acceptance_length']:.2f}",
            f"{rates['dspark']:.1f}",
            f"{rates['none']:.1f}",
            "yes" if report["greedy_equal"] else "NO",
        ]
    )
    header = ["kind", "tokens", "tokens/round", "DSpark tok/s", "plain tok/s", "equal"]
    to(
        f"\n{report['numerics']} numerics, temperature 0, one stream at a time\n"
        + table(header, rows)
    )
    if "fast" in report:
        fast = report["fast"]
        to(f"fast numerics: {fast['dspark']:.1f} tokens/s with DSpark, {fast['none']:.1f} without")
