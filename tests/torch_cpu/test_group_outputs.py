"""A group writes what one rank writes, by either dispatch, with speculation and without, while experts move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.core.sampling import SamplingParams
from actors.engine.sharded_experts import DISPATCH_MODES
from tests.torch_cpu.group_cluster import GroupCluster, group_config, until
from tests.torch_cpu.group_streams import GREEDY, STREAMS, by_request, output, texts_of

Texts = dict[str, list[int]]


@pytest.fixture(scope="module", params=["mixtral", "llama"])
def model(oracle_models: Path, request: pytest.FixtureRequest) -> Path:
    """A mixture of experts, and a dense model whose feed-forwards are cut into slices."""
    torch.set_num_threads(1)
    return oracle_models / request.param


@pytest.fixture(scope="module")
def texts(model: Path) -> Texts:
    return texts_of(model)


@pytest.fixture(scope="module")
def mixtral(oracle_models: Path) -> Path:
    torch.set_num_threads(1)
    return oracle_models / "mixtral"


@pytest.fixture(scope="module")
def moe_texts(mixtral: Path) -> Texts:
    return texts_of(mixtral)


def outputs(config: Any, texts: Texts) -> Texts:
    """What a cluster makes of a greedy and a seeded stream, on its first rank and on its last, others idle."""
    found: Texts = {}
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
def alone(model: Path, texts: Texts) -> Texts:
    return outputs(group_config(model, 1, policy="none"), texts)


@pytest.mark.parametrize("policy", ["none", "static_length"])
@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_of_any_size_writes_what_one_rank_without_speculation_writes(
    model: Path,
    texts: Texts,
    alone: Texts,
    size: int,
    mode: str,
    policy: str,
) -> None:
    assert alone["decode 0"] == output(texts, "decode")
    found = outputs(group_config(model, size, mode, policy), texts)
    for name, tokens in found.items():
        assert tokens == alone[f"{name.split()[0]} 0"], name


def test_a_served_group_moves_experts_without_a_wrong_token(
    mixtral: Path, moe_texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)  # move for nothing too
    config = group_config(mixtral, 2, rebalance_steps=5)
    whole = output(moe_texts, "decode")
    with GroupCluster(config, by_request(moe_texts)) as cluster:

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


def test_a_rank_that_leaves_its_group_closes_it_for_all(mixtral: Path, moe_texts: Texts) -> None:
    with GroupCluster(group_config(mixtral, 2), by_request(moe_texts)) as cluster:
        asyncio.run(cluster.ranks[1].stop())
        until(lambda: cluster.ranks[0]._member.is_closed)
        assert cluster.agreed()[-1].leaving == (1,)
    assert not cluster.failures


def test_a_rank_whose_group_has_lost_one_ends_with_the_cause(
    mixtral: Path, moe_texts: Texts
) -> None:
    """Its engine raises inside a step: the streams are not failed, the process ends, and so the other rank's."""
    config = group_config(mixtral, 2, bound_s=3.0)
    with GroupCluster(config, by_request(moe_texts)) as cluster:
        model = cluster.ranks[0]._engine.model
        broken: Callable[..., Any] = lambda *_: (_ for _ in ()).throw(OSError("device lost"))  # noqa: E731
        model.forward = broken
        cluster.submit("decode.0", 0, *STREAMS["decode"], GREEDY)
        with pytest.raises(AssertionError, match="device lost"):
            cluster.finish("decode.0")
        assert cluster.reason("decode.0") is None
