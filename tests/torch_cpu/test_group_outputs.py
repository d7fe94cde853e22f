"""A group writes what one rank writes, by either dispatch, with speculation and without, while experts move."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.core.sampling import SamplingParams
from actors.engine import upcycle
from actors.engine.sharded_experts import DISPATCH_MODES
from configs.recipe import UpcycleRecipe
from tests.torch_cpu.group_cluster import GroupCluster, group_config, until
from tests.torch_cpu.group_streams import GREEDY, STREAMS, by_request, output, texts_of

Texts = dict[str, list[int]]
SEEDED = SamplingParams(seed=11)


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
        for name, params in (("decode", GREEDY), ("seeded", SEEDED)):
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
def alone(group_model: Path, group_texts: Texts) -> Texts:
    return outputs(group_config(group_model, 1, policy="none"), group_texts)


@pytest.mark.parametrize("policy", ["none", "static_length"])
@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_of_any_size_writes_what_one_rank_without_speculation_writes(
    group_model: Path,
    group_texts: Texts,
    alone: Texts,
    size: int,
    mode: str,
    policy: str,
) -> None:
    assert alone["decode 0"] == output(group_texts, "decode")
    found = outputs(group_config(group_model, size, mode, policy), group_texts)
    for name, tokens in found.items():
        assert tokens == alone[f"{name.split()[0]} 0"], name


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_a_served_group_moves_experts_without_a_wrong_token(
    mixtral: Path, moe_texts: Texts, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Greedy on one rank, seeded on the other, before experts have moved and after."""
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)  # move for nothing too
    want = outputs(group_config(mixtral, 1, policy="none"), moe_texts)
    config = group_config(mixtral, 2, mode, rebalance_steps=5)
    kinds = [("decode", GREEDY), ("seeded", SEEDED)]
    with GroupCluster(config, by_request(moe_texts)) as cluster:

        def num_moved() -> list[int]:
            stats = [asyncio.run(rank.stats())["group"] for rank in cluster.ranks]
            return [of_rank["num_rebalances"] for of_rank in stats]

        for number in range(40):
            for rank, (name, params) in enumerate(kinds):
                cluster.submit(f"{name}.{number}", rank, *STREAMS[name], params)
            cluster.finish(*(f"{name}.{number}" for name, _ in kinds))
            for name, _ in kinds:
                assert cluster.tokens(f"{name}.{number}") == want[f"{name} 0"]
            if min(num_moved()) >= 3:
                break
        assert min(num_moved()) >= 3


@pytest.fixture(scope="module")
def skewed(oracle_models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts]:
    """A dense model upcycled with a router that prefers its first experts, and what the dense one writes."""
    torch.set_num_threads(1)
    dense = tmp_path_factory.mktemp("skewed") / "dense"
    shutil.copytree(oracle_models / "llama", dense)
    tensors = load_file(dense / "model.safetensors")
    tensors["model.embed_tokens.weight"] += (
        0.1  # a direction that all tokens share, as trained models have
    )
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    recipe = UpcycleRecipe(dense=str(dense), skew=4.0)
    return upcycle.upcycle(recipe, dense.parent / "moe", progress=False), texts_of(dense)


def test_a_skewed_router_makes_a_served_group_move_experts_over_nodes_without_a_wrong_token(
    skewed: tuple[Path, Texts],
) -> None:
    """Four ranks on two nodes: what is hot comes to lie on both, and the texts stay those of the dense model."""
    folder, dense_texts = skewed
    config = group_config(folder, 4, "all_to_all", rebalance_steps=12)
    seen: list[float] = []
    with GroupCluster(config, by_request(dense_texts)) as cluster:
        engines = [rank._engine for rank in cluster.ranks]
        for rank, engine in enumerate(engines):
            engine.group.node = rank // 2
        for number in range(40):
            ids = [f"decode.{4 * number + rank}" for rank in range(4)]
            for rank, request_id in enumerate(ids):
                cluster.submit(request_id, rank, *STREAMS["decode"], GREEDY)
            cluster.finish(*ids)
            assert all(cluster.tokens(i) == output(dense_texts, "decode") for i in ids)
            balance = asyncio.run(cluster.ranks[0].stats())["group"]
            seen.append(balance["expert_imbalance"] or 0.0)
            if balance["num_rebalances"] and seen[-1] < 0.8 * max(seen):
                break
        assert balance["num_rebalances"] and seen[-1] < 0.8 * max(seen), seen
        placements = [engine.group.on_layout.__self__.placements for engine in engines]
        assert all(of_rank == placements[0] for of_rank in placements)
        hot = [placement.holders[0] for placement in placements[0]]
        assert all({rank // 2 for rank in ranks} == {0, 1} for ranks in hot), hot


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
