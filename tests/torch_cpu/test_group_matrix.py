"""Whatever two ranks of a group do at the same time, nobody waits for ever and every text is what it is alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingParams
from actors.engine.sharded_experts import DISPATCH_MODES
from actors.engine.trial import TrialSequences
from tests.torch_cpu.group_cluster import MAX_MODEL_LEN, GroupCluster, group_config, until
from tests.torch_cpu.oracle_models import engine_of

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 14


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


@pytest.fixture(scope="module")
def mixtral(oracle_models: Path) -> Path:
    torch.set_num_threads(1)
    return oracle_models / "mixtral"


@pytest.fixture(scope="module")
def texts(mixtral: Path) -> dict[str, list[int]]:
    """Prompt and greedy output of every stream, by one engine that has all experts."""
    found = {}
    for name, (ids, num_tokens) in STREAMS.items():
        row = np.array([*ids, *[0] * num_tokens])
        engine = engine_of(mixtral)
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


@pytest.fixture(scope="module")
def pair(mixtral: Path, texts: dict[str, list[int]]) -> Iterator[GroupCluster]:
    # Noise in one rank's confidences: were they to shape anything shared, the ranks would part.
    config = group_config(mixtral, 2, policy="lagged")
    with GroupCluster(config, by_request(texts), jitter=1e-4) as cluster:
        yield cluster


def begin(cluster: GroupCluster, doing: str, rank: int, number: int) -> str | None:
    """Bring a rank into a state; returns the id of its stream."""
    if doing == "idle":
        return None
    name = f"{doing}.{number}"
    ids, num_tokens = STREAMS[doing]
    cluster.submit(name, rank, ids, num_tokens, GREEDY)
    return name


def disturb(cluster: GroupCluster, doing: str, rank: int, request_id: str | None) -> None:
    """What happens to a rank while its stream runs."""
    if doing == "drain":
        until_started(cluster, request_id)
        asyncio.run(cluster.ranks[rank].drain())
    if doing == "cancel":
        until_started(cluster, request_id)
        cluster.abort(str(request_id))


def until_started(cluster: GroupCluster, request_id: str | None) -> None:
    assert request_id is not None

    def started() -> Any:
        cluster.poll()
        return cluster.deltas.get(request_id)

    until(started)


def open_again(cluster: GroupCluster, rank: int) -> None:
    shell = cluster.ranks[rank]
    shell._rank.book.desk.draining = False
    shell.enter("ready")


STATES = ("idle", "prefill", "decode", "limit", "drain", "late", "cancel")


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, id=" beside ".join(pair)) for pair in itertools.product(STATES, STATES)],
)
def test_a_group_goes_on_whatever_two_ranks_do(
    pair: GroupCluster, texts: dict[str, list[int]], first: str, second: str
) -> None:
    number = STATES.index(first) * len(STATES) + STATES.index(second)
    doings = (first, second)
    ids = [begin(pair, doing, rank, 2 * number + rank) for rank, doing in enumerate(doings)]
    for rank, doing in enumerate(doings):
        disturb(pair, doing, rank, ids[rank])
    streams = [request_id for request_id in ids if request_id]
    pair.finish(*streams)
    for doing, request_id in zip(doings, ids, strict=True):
        if request_id is None:
            continue
        whole = texts[doing][len(STREAMS[doing][0]) :]
        got = pair.tokens(request_id)
        assert got == whole[: len(got)]
        assert doing == "cancel" or got == whole
    for rank, doing in enumerate(doings):
        if doing == "drain":
            open_again(pair, rank)
    assert pair.agreed()[-1].num_tokens is not None


def test_confidences_that_differ_on_one_rank_change_no_layout_of_the_group(
    pair: GroupCluster, texts: dict[str, list[int]]
) -> None:
    for rank in (0, 1):
        pair.submit(f"decode.{500 + rank}", rank, *STREAMS["decode"], GREEDY)
    pair.finish("decode.500", "decode.501")
    assert pair.tokens("decode.500") == pair.tokens("decode.501")
    agreed = pair.agreed()  # asserts that both ranks hold the same layouts
    assert [layout.step for layout in agreed] == list(range(len(agreed)))
    assert any(0 in layout.num_tokens and layout.runs for layout in agreed)


def outputs(config: Any, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """What a cluster makes of a greedy and a seeded stream, on its first rank and on its last, others idle."""
    found: dict[str, list[int]] = {}
    with GroupCluster(config, by_request(texts)) as cluster:
        last = cluster.size - 1
        for name, params in (("decode", GREEDY), ("seeded", SamplingParams(seed=11))):
            ids, num_tokens = STREAMS[name]
            for number, rank in enumerate({0, last}):
                cluster.submit(f"{name}.{number}", rank, ids, num_tokens, params)
                cluster.finish(f"{name}.{number}")
                found[f"{name} {number}"] = cluster.tokens(f"{name}.{number}")
        stats = asyncio.run(cluster.ranks[0].stats())
        assert stats["is_row_invariant"]
        assert (stats["group"] is None) == (cluster.size == 1)
    assert not cluster.failures
    return found


@pytest.fixture(scope="module")
def alone(mixtral: Path, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    return outputs(group_config(mixtral, 1, policy="none"), texts)


@pytest.mark.parametrize("policy", ["none", "static_length"])
@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_of_any_size_writes_what_one_rank_without_speculation_writes(
    mixtral: Path,
    texts: dict[str, list[int]],
    alone: dict[str, list[int]],
    size: int,
    mode: str,
    policy: str,
) -> None:
    assert alone["decode 0"] == texts["decode"][len(STREAMS["decode"][0]) :]
    found = outputs(group_config(mixtral, size, mode, policy), texts)
    for name, tokens in found.items():
        assert tokens == alone[f"{name.split()[0]} 0"], name


def test_a_served_group_moves_experts_without_a_wrong_token(
    mixtral: Path, texts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)  # move for nothing too
    config = group_config(mixtral, 2, rebalance_steps=5)
    whole = texts["decode"][len(STREAMS["decode"][0]) :]
    with GroupCluster(config, by_request(texts)) as cluster:

        def num_moved() -> list[int]:
            stats = [asyncio.run(rank.stats())["group"] for rank in cluster.ranks]
            return [of_rank["num_rebalances"] for of_rank in stats]

        for number in range(40):
            for rank in (0, 1):
                cluster.submit(f"decode.{2 * number + rank}", rank, *STREAMS["decode"], GREEDY)
            cluster.finish(f"decode.{2 * number}", f"decode.{2 * number + 1}")
            assert cluster.tokens(f"decode.{2 * number}") == whole
            assert cluster.tokens(f"decode.{2 * number + 1}") == whole
            if min(num_moved()) >= 3:
                break
        assert min(num_moved()) >= 3


def test_a_rank_that_leaves_its_group_closes_it_for_all(
    mixtral: Path, texts: dict[str, list[int]]
) -> None:
    with GroupCluster(group_config(mixtral, 2), by_request(texts)) as cluster:
        asyncio.run(cluster.ranks[1].stop())
        until(lambda: cluster.ranks[0]._member.is_closed)
        assert cluster.agreed()[-1].leaving == (1,)
    assert not cluster.failures


def test_a_rank_whose_group_has_lost_one_ends_with_the_cause(
    mixtral: Path, texts: dict[str, list[int]]
) -> None:
    """Its engine raises inside a step: the streams are not failed, the process ends, and so the other rank's."""
    config = group_config(mixtral, 2, bound_s=3.0)
    with GroupCluster(config, by_request(texts)) as cluster:
        model = cluster.ranks[0]._engine.model
        broken: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(OSError("device lost"))  # noqa: E731
        model.forward = broken
        cluster.submit("decode.0", 0, *STREAMS["decode"], GREEDY)
        with pytest.raises(AssertionError, match="device lost"):
            cluster.finish("decode.0")
        assert cluster.reason("decode.0") is None
