"""What ranks of a group do beside each other in tests: streams of known texts, and states to bring a rank into."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from actors.core.sampling import SamplingParams
from actors.engine.trial import TrialSequences
from tests.torch_cpu.group_cluster import MAX_MODEL_LEN, GroupCluster, until
from tests.torch_cpu.oracle_models import engine_of

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 14
STATES = ("idle", "prefill", "decode", "limit", "drain", "late", "cancel")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 150, length).tolist()


# Of each stream that the tests run: its prompt and how many tokens it may write.
STREAMS = {
    "prefill": (prompt(1, 70), 3),
    "decode": (prompt(2, 5), LENGTH),
    "limit": (prompt(3, MAX_MODEL_LEN - 9), 9),
    "drain": (prompt(4, 6), LENGTH),
    "late": (prompt(5, 4), 6),
    "cancel": (prompt(6, 7), 60),
    "seeded": (prompt(7, 8), LENGTH),
}


def texts_of(model_dir: Path) -> dict[str, list[int]]:
    """Prompt and greedy output of every stream, by one engine that has the whole model."""
    found = {}
    for name, (ids, num_tokens) in STREAMS.items():
        row = np.array([*ids, *[0] * num_tokens])
        engine = engine_of(model_dir)
        rows = TrialSequences(engine, [row])
        logits = rows.logits({0: len(ids)})[0]
        for place in range(len(ids), len(row)):
            row[place] = int(logits[-1].argmax())
            if row[place] in engine.spec.eos_token_ids:
                row = row[: place + 1]
                break
            if place + 1 < len(row):
                logits = rows.logits({0: 1})[0]
        found[name] = row.tolist()
    return found


def by_request(texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The texts under every id that a test may use: `<stream>.<anything up to three digits>`."""
    return {f"{name}.{i}": text for name, text in texts.items() for i in range(1000)}


def output(texts: dict[str, list[int]], name: str) -> list[int]:
    return texts[name][len(STREAMS[name][0]) :]


def check_states(
    cluster: GroupCluster, texts: dict[str, list[int]], states: tuple[str, ...], number: int
) -> None:
    """Bring every rank into its state at the same time; each stream is what it is alone, and nobody waits for ever."""
    ids = [_begin(cluster, state, rank, number) for rank, state in enumerate(states)]
    for rank, state in enumerate(states):
        _disturb(cluster, state, rank, ids[rank])
    cluster.finish(*(request_id for request_id in ids if request_id))
    for state, request_id in zip(states, ids, strict=True):
        if request_id is None:
            continue
        got, whole = cluster.tokens(request_id), output(texts, state)
        assert got == whole[: len(got)]
        assert state == "cancel" or got == whole
    for rank, state in enumerate(states):
        if state == "drain":
            _open_again(cluster, rank)
    cluster.agreed()  # asserts that all ranks hold the same layouts


def _begin(cluster: GroupCluster, state: str, rank: int, number: int) -> str | None:
    """Bring a rank into a state; returns the id of its stream."""
    if state == "idle":
        return None
    name = f"{state}.{cluster.size * number + rank}"
    cluster.submit(name, rank, *STREAMS[state], GREEDY)
    return name


def _disturb(cluster: GroupCluster, state: str, rank: int, request_id: str | None) -> None:
    """What happens to a rank while its stream runs."""
    if state in ("drain", "cancel"):
        _until_started(cluster, request_id)
    if state == "drain":
        shell = cluster.ranks[rank]
        asyncio.run(shell.on_loop(shell._rank.drain))
    if state == "cancel":
        cluster.abort(str(request_id))


def _until_started(cluster: GroupCluster, request_id: str | None) -> None:
    assert request_id is not None

    def started() -> Any:
        cluster.poll()
        return cluster.deltas.get(request_id)

    until(started)


def _open_again(cluster: GroupCluster, rank: int) -> None:
    shell = cluster.ranks[rank]
    shell._rank.book.desk.draining = False
    shell.enter("ready")
