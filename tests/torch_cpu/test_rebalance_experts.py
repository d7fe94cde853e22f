"""Experts move to other ranks while streams run, and no bit of any stream changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine import upcycle
from actors.engine.rebalance import Rebalancer
from actors.engine.sharded_experts import DISPATCH_MODES
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import TrialSequences
from actors.engine.weights import Checkpoint
from configs.recipe import UpcycleRecipe
from tests.torch_cpu.oracle_models import engine_of
from tests.torch_cpu.test_lockstep_engine import engine_in
from tests.torch_cpu.thread_ranks import ThreadCollective, on_ranks

EVERY = 4
TOKENS = 36


@pytest.fixture(scope="module")
def mixtral(oracle_models: Path) -> Path:
    torch.set_num_threads(1)
    return oracle_models / "mixtral"


def rows_of(engine: TorchTargetEngine, rank: int) -> TrialSequences:
    ids = np.random.default_rng(rank).integers(3, 150, TOKENS)
    return TrialSequences(engine, [ids])


def decode(rows: TrialSequences) -> Iterator[Tensor]:
    yield rows.logits({0: 9})[0]
    for _ in range(9, TOKENS):
        yield rows.logits({0: 1})[0]


def rebalancing(
    model_dir: Path, collective: ThreadCollective, mode: str, num_redundant: int
) -> tuple[TorchTargetEngine, Rebalancer]:
    engine = engine_in(model_dir, collective, mode)
    made = Rebalancer(engine.model, Checkpoint(model_dir), EVERY, num_redundant)
    return engine, made


@pytest.mark.parametrize("num_redundant", [0, 1])
@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_streams_are_the_same_before_and_after_experts_moved(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, mode: str, num_redundant: int
) -> None:
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)  # move for nothing too
    want = [list(decode(rows_of(engine_of(mixtral), rank))) for rank in range(2)]

    def rank(collective: ThreadCollective) -> tuple[list[Tensor], int, Rebalancer]:
        engine, rebalancer = rebalancing(mixtral, collective, mode, num_redundant)
        found = []
        for logits in decode(rows_of(engine, collective.rank)):
            found.append(logits)
            reader = rebalancer._reader
            if reader is not None:  # so that placements do change within so short a text
                reader.join(30)
        return found, engine.group.balance["num_rebalances"], rebalancer

    results, _ = on_ranks(2, rank)
    for (found, moved, _), wanted in zip(results, want, strict=True):
        assert moved >= 2
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    first, second = (rebalancer.placements for _, _, rebalancer in results)
    assert first == second
    held = max(len(p.held_by(rank)) for p in first for rank in range(2))
    assert held <= 2 + num_redundant


def test_moving_experts_evens_a_skewed_load(oracle_models: Path, tmp_path: Path) -> None:
    recipe = UpcycleRecipe(dense=str(oracle_models / "llama"), skew=0.0, top_k=1)
    folder = upcycle.upcycle(recipe, tmp_path / "moe", progress=False)
    # Two hot experts that lie on one rank: the even placement serves everything there.
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("gate.weight"):
                tensors[name][2] = tensors[name][0] * 0.01
                tensors[name][3] = tensors[name][0] * 0.01
                tensors[name][1] = -tensors[name][0]
        save_file(tensors, path, metadata={"format": "pt"})

    def rank(collective: ThreadCollective) -> tuple[float, float]:
        engine, rebalancer = rebalancing(folder, collective, "all_gather", 0)
        worst = []
        for _ in decode(rows_of(engine, collective.rank)):
            worst.append(float(engine.group.balance["expert_imbalance"] or 1.0))
            if rebalancer._reader is not None:
                rebalancer._reader.join(30)
        return max(worst), worst[-1]

    for before, after in on_ranks(2, rank)[0]:
        assert before > 1.6 and after < 1.4


def test_the_load_of_experts_that_never_move_is_looked_at_too(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.engine.rebalance.OBSERVED_STEPS", EVERY)
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)

    def rank(collective: ThreadCollective) -> dict[str, float]:
        engine = engine_in(mixtral, collective, "all_gather")
        assert engine.group.balance["expert_imbalance"] is None
        list(decode(rows_of(engine, collective.rank)))
        return engine.group.balance

    first, second = on_ranks(2, rank)[0]
    assert first == second and first["expert_imbalance"] > 1 and first["num_rebalances"] == 0


def test_ranks_go_on_when_one_cannot_read_its_new_experts(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("actors.core.expert_balance.MIN_GAIN", -10.0)
    want = [list(decode(rows_of(engine_of(mixtral), rank)))[-1] for rank in range(2)]

    def rank(collective: ThreadCollective) -> tuple[Tensor, dict[str, float]]:
        engine, rebalancer = rebalancing(mixtral, collective, "all_gather", 0)
        if collective.rank:
            rebalancer._tensors = {}
            monkeypatch.setattr(
                engine.model, "expert_bank", lambda *_: (_ for _ in ()).throw(OSError("disk gone"))
            )
        return list(decode(rows_of(engine, collective.rank)))[-1], engine.group.balance

    results = on_ranks(2, rank)[0]
    for (found, balance), wanted in zip(results, want, strict=True):
        assert torch.equal(found, wanted) and balance["num_rebalances"] == 0
    assert [balance["num_failed_rebalances"] for _, balance in results] == [0, 1]
    assert "could not read the experts" in caplog.text


def test_load_of_experts_is_counted_for_a_ranks_own_tokens(mixtral: Path) -> None:
    def rank(collective: ThreadCollective) -> list[int]:
        engine = engine_in(mixtral, collective, "all_to_all")
        rows_of(engine, 0).logits({0: 7 + collective.rank})
        return [int(layer.mlp.load.sum()) for layer in engine.model.layers]  # type: ignore[union-attr]

    assert on_ranks(2, rank)[0] == [[14] * 3, [16] * 3]
