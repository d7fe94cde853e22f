"""One host computes slower: its profile, its budgets, where streams go, and what that brings against equal budgets."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.model_files import BUNDLED
from tests.cluster.operator_machine import Operator
from tests.cluster.steps import foretold, say
from tests.cluster.streams import Load

CORES = 0.25  # of the slowed host
TURNS = 3  # each policy is measured so often, in turns
SETTLED_S = 2.5  # the supervisor asks the members for their counts at most once a second
# What an assistant is asked, so that the drafter has something to foresee.
QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "List the planets of the solar system, in order.",
    "What is 17 times 23? Show each step.",
    "Explain in three sentences how a bicycle stays upright.",
    "Write a SQL query that counts the orders of each customer.",
    "Give me a recipe for pancakes with exact amounts.",
)
_RULE = re.compile(r'^dspark:published_budgets_total\{rule="([^"]+)"\} (\S+)$', re.MULTILINE)
_SAMPLE = re.compile(r"^dspark:(rounds|scheduled_tokens)_total\{(.*)\} (\S+)$", re.MULTILINE)
_RANK = re.compile(r'rank="([^"]+)"')


@dataclass(frozen=True)
class Case:
    """A deployment and its load.

    Attributes:
        max_running: of a rank; with room for no more streams than there are, each rank has as many every time.
    """

    is_wide: bool  # `tiny_mixture.WIDE`; otherwise the bundled model
    group_size: int
    num_ranks: int
    policy: str
    drafter: str
    prompts: tuple[str, ...]
    num_tokens: int
    max_running: int
    max_waiting: int
    max_model_len: int


GROUP = Case(
    is_wide=True,
    group_size=3,
    num_ranks=3,
    policy="joint",
    # What repeats itself is foreseen without a model, and drafting takes no time: verifying is all there is to compare.
    drafter="ngram",
    prompts=tuple(QUESTIONS) * 3,
    num_tokens=128,
    max_running=6,
    max_waiting=0,
    max_model_len=256,
)
ALONE = Case(
    is_wide=False,
    group_size=1,
    num_ranks=3,
    policy="lagged",
    drafter=str(BUNDLED / "smollm2-135m" / "drafter"),
    prompts=QUESTIONS + QUESTIONS[:3],
    num_tokens=48,
    max_running=8,
    max_waiting=8,
    max_model_len=128,
)


def settings(model: str, ingress: dict[str, Any], case: Case) -> dict[str, Any]:
    """For the model that lies in the folder `model`."""
    return {
        "model": {
            "path": model,
            "drafter": case.drafter,
            "name": "drill",
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": case.max_model_len,
        },
        "target": {
            "num_ranks": case.num_ranks,
            "group_size": case.group_size,
            "num_cpus": 1,
            "num_threads": 1,
            "node_resource": "target",
            "kv_cache_tokens": 16384,
            "max_running": case.max_running,
            "max_waiting": case.max_waiting,
        },
        "drafter": {"num_actors": case.num_ranks, "num_cpus": 0, "num_threads": 1},
        "policy": {"name": case.policy},
        "ingress": ingress,
    }


@dataclass(frozen=True)
class Comparison:
    """What a policy gave the slow rank and the others: draft tokens a round, and its share of the rounds."""

    slow: float
    healthy: float
    share: float
    num_ranks: int
    gain: float  # tokens/s over those of equal budgets, median of the turns


@dataclass(frozen=True)
class Measured:
    """One load under one policy, while all of its streams are open: some end sooner, and the rest run alone."""

    tokens_per_s: float
    draft_tokens_a_round: dict[str, float]  # by rank, verified
    share: dict[str, float]  # of all rounds, by rank
    length: float  # draft tokens a round of all ranks
    texts: tuple[tuple[int, ...], ...]


def compare(operator: Operator, endpoint: str, slow_rank: str, case: Case) -> Comparison:
    """In turns measure the policy, and about as many draft tokens spread evenly; with the same streams.

    Raises:
        AssertionError: a budget changed what is said.
    """
    _measure(endpoint, case)  # warms everything up
    own, equal, lengths = [], [], []
    for _ in range(TURNS):
        own.append(_measure(endpoint, case))
        lengths.append(max(1, round(own[-1].length)))
        _order(operator, "static_length", lengths[-1])
        equal.append(_measure(endpoint, case))
        _order(operator, case.policy, lengths[-1])
    assert len({measured.texts for measured in own + equal}) == 1, "budgets changed the texts"
    drafts = [m.draft_tokens_a_round for m in own]
    speeds = [[m.tokens_per_s for m in runs] for runs in (own, equal)]
    gains = [a / b for a, b in zip(*speeds, strict=True)]
    found = Comparison(
        slow=statistics.median(d.get(slow_rank, 0.0) for d in drafts),
        healthy=statistics.median(x for d in drafts for x in _healthy(d, slow_rank)),
        share=statistics.median(m.share.get(slow_rank, 0.0) for m in own),
        num_ranks=case.num_ranks,
        gain=statistics.median(gains),
    )
    say(
        f"draft tokens a round: {found.slow:.2f} there, {found.healthy:.2f} elsewhere; "
        f"{found.share:.0%} of the rounds ran there"
    )
    say(
        f"tokens/s, median of {TURNS}: {statistics.median(speeds[0]):.1f} with `{case.policy}`, "
        f"{statistics.median(speeds[1]):.1f} with as many evenly spread ({lengths} a round); "
        f"ratio {found.gain:.2f} (from {min(gains):.2f} to {max(gains):.2f})"
    )
    rules = _RULE.findall(_metrics(endpoint))
    say(f"budgets of the allocator by rule: {', '.join(f'{n} {float(c):.0f}' for n, c in rules)}")
    return found


def check_profiles(operator: Operator, slow_rank: str) -> None:
    """Every rank has measured its own machine; in a group, what it does itself in a step of all."""
    for tokens, (slow_ms, healthy_ms) in _curves(operator, slow_rank).items():
        say(
            f"{tokens} tokens of its own take {slow_ms:.1f} ms there, {healthy_ms:.1f} ms elsewhere"
        )
        foretold(slow_ms > healthy_ms, "the slow one knows it is")


def _healthy(by_rank: dict[str, float], slow_rank: str) -> list[float]:
    return [value for rank, value in by_rank.items() if rank != slow_rank]


def _curves(operator: Operator, slow_rank: str) -> dict[int, tuple[float, float]]:
    """By tokens of a step, the smallest and the largest that was measured: milliseconds there, and the others' mean."""
    ranks = {rank["name"]: rank for rank in operator.on_cluster("profile")["ranks"]}
    sizes = ranks[slow_rank]["batch_tokens"]
    found = {}
    for size in (sizes[0], sizes[-1]):
        cost = {
            name: 1e3
            * (rank["own_time_s"] or rank["step_time_s"])[rank["batch_tokens"].index(size)]
            for name, rank in ranks.items()
            if size in rank["batch_tokens"]
        }
        found[size] = (cost[slow_rank], statistics.mean(_healthy(cost, slow_rank)))
    return found


def _order(operator: Operator, policy: str, length: int) -> None:
    operator.on_cluster(
        "rollout", "--set", f"policy.name={policy}", "--set", f"policy.static_length={length}"
    )


def _measure(endpoint: str, case: Case) -> Measured:
    time.sleep(SETTLED_S)
    before = _counts(endpoint)
    load = Load(endpoint, "drill", case.prompts, case.num_tokens).start()
    load.until(lambda: load.num_begun == len(load.streams))
    assert not load.num_done, "the streams are too short to be open at once"
    started, num_before = time.monotonic(), load.num_tokens
    load.until(lambda: load.num_done > 0)
    seconds, num_tokens = time.monotonic() - started, load.num_tokens - num_before
    time.sleep(SETTLED_S)
    after = _counts(endpoint)
    streams = load.finish()
    gone = {key: value - before.get(key, 0.0) for key, value in after.items()}
    rounds = {rank: gone["rounds", rank] for kind, rank in gone if kind == "rounds"}
    sent = {rank: gone.get(("scheduled_tokens", rank), 0.0) for rank in rounds}
    return Measured(
        num_tokens / seconds,
        {rank: sent[rank] / count for rank, count in rounds.items() if count},
        {rank: count / sum(rounds.values()) for rank, count in rounds.items()},
        sum(sent.values()) / sum(rounds.values()),
        tuple(tuple(stream.tokens) for stream in streams),
    )


def _counts(endpoint: str) -> dict[tuple[str, str], float]:
    """Rounds and verified draft tokens so far, by rank."""
    counts: dict[tuple[str, str], float] = {}
    for name, labels, value in _SAMPLE.findall(_metrics(endpoint)):
        found = _RANK.search(labels)
        assert found is not None, labels
        key = (name, found[1])
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def _metrics(endpoint: str) -> str:
    url = endpoint.removesuffix("/v1") + "/metrics"
    return httpx.get(url, timeout=20, trust_env=False).text
