"""The GPU's forward, up to the launch: paged layout, captured tiers, stacked experts, run here on the torch twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from actors.core.layout import StepPlan
from actors.engine import packed_linear, paged_step
from actors.engine.expert_group import ExpertGroup
from actors.engine.experts import ExpertList, ExpertStacks, MoeLayer, TopKRouter
from actors.engine.graphs import Recorded, Recorder
from actors.engine.packed_linear import GatedMlp, Linear, TiledLinear
from actors.engine.paged_step import PagedForward
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import TrialSequences
from kernels import dispatch
from tests.torch_cpu.graph_tape import TapeRecorder
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.oracle_models import engine_of, expected
from tests.torch_cpu.tiny_target import TAPS, tiny_engine

T = TypeVar("T")


class RefusingRecorder:
    def record(self, run: Callable[[], T]) -> Recorded[T]:
        raise RuntimeError("operation not permitted when stream is capturing")

    def forget(self) -> None:
        pass


@pytest.fixture
def engine() -> TorchTargetEngine:
    torch.set_num_threads(1)
    return tiny_engine("cpu")


@pytest.fixture
def recorder() -> Iterator[TapeRecorder]:
    made = TapeRecorder()
    with made.watched_kernels():
        yield made


def paged(engine: TorchTargetEngine, recorder: Recorder | None) -> PagedForward:
    # Free slots are not numbers: reading one shows.
    store = engine.model.new_store(64, 16)
    for layer in range(engine.spec.num_layers):
        store.pool(layer).fill_(torch.nan)
    return PagedForward(engine.model, store, TAPS, 128, recorder)


def steps(engine: TorchTargetEngine) -> list[StepPlan]:
    """Prompts, then ragged rounds, one of which goes back over rejected drafts."""
    ids = [np.random.default_rng(row).integers(0, 60, 60) for row in range(3)]
    rows = TrialSequences(engine, ids)
    plans = [rows.plan({0: 17, 1: 1, 2: 30})]
    for query_len in ({0: 4, 1: 1, 2: 2}, {0: 1, 2: 3}, {1: 2}, {0: 4, 1: 4, 2: 4}):
        plan = rows.plan(query_len, rounds=True)
        bound = plan.num_requests + 9
        plans.append(replace(plan, token_bound=bound))
        rows.length[0] -= 1
    return plans


def check(engine: TorchTargetEngine, forward: PagedForward) -> None:
    with torch.inference_mode():
        for plan in steps(engine):
            want, want_taps = engine._forward(plan)
            hidden, taps = forward(plan)
            assert taps is not None and want_taps is not None
            torch.testing.assert_close(hidden, want, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(taps, want_taps, atol=2e-5, rtol=1e-4)


def test_paged_kernels_compute_the_same_steps(engine: TorchTargetEngine) -> None:
    forward = paged(engine, None)
    check(engine, forward)
    assert forward.num_uncaptured == 4  # the rounds; prompts are never captured


def test_a_group_on_a_gpu_says_that_it_runs_uncaptured(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "implementation", lambda op, kind: "triton")
    alone = engine_of(oracle_models / "mixtral")
    assert alone.paged is not None and alone.paged._recorder is not None
    assert "uncaptured" not in caplog.text
    grouped = engine_of(oracle_models / "mixtral", group=ExpertGroup(0, 2))
    assert grouped.paged is not None and grouped.paged._recorder is None
    assert "all run uncaptured" in caplog.text and grouped.num_uncaptured == 0


def test_a_captured_step_is_replayed_for_every_plan_of_its_tier(
    engine: TorchTargetEngine, recorder: TapeRecorder
) -> None:
    forward = paged(engine, recorder)
    check(engine, forward)
    # Bounds 12, 11, 10 and 12 are all of tier 12, whatever was scheduled.
    assert recorder.num_records == 1
    assert forward.num_replays == 4 and forward.num_uncaptured == 0


@pytest.mark.parametrize("name", ["mistral", "qwen2_windowed", "qwen3_moe", "mixtral"])
def test_windows_and_experts_are_captured_too(
    oracle_models: Path, name: str, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in stacks, as a GPU has them: how many rows each gets never reaches the host."""
    monkeypatch.setattr(packed_linear, "packs", lambda _weight: False)
    engine = engine_of(oracle_models / name, block_size=16)
    for layer in engine.model.layers:
        if isinstance(layer.mlp, MoeLayer):
            layer.mlp = stacked(layer.mlp)
    rows = TrialSequences(engine, expected(oracle_models / name).token_ids)
    forward = paged(engine, recorder)
    forward.taps, forward.max_model_len = engine.spec.tap_layer_ids, 128
    plans = [rows.plan({0: 40, 2: 9, 3: 30})]
    for query_len in ({0: 4, 2: 1, 3: 6}, {2: 3, 0: 2}, {3: 5, 2: 2, 0: 4}):
        plans.append(replace(rows.plan(query_len, rounds=True), token_bound=12))
    with torch.inference_mode():
        for plan in plans:
            want, _ = engine._forward(plan)
            hidden, _ = forward(plan)
            torch.testing.assert_close(hidden, want, atol=1e-4, rtol=1e-3)
    assert recorder.num_records == 1 and forward.num_replays == 3


def stacked(layer: MoeLayer) -> MoeLayer:
    assert isinstance(layer.bank, ExpertList)
    experts = layer.bank.experts
    halves = [expert._gate_up._weight.chunk(2) for expert in experts]
    gate, up = (torch.stack(part) for part in zip(*halves, strict=True))
    bank = ExpertStacks(gate, up, torch.stack([expert.down._weight for expert in experts]))
    return MoeLayer(layer.router, bank)


BROKEN = {
    "tokens": ("self._ids.copy_(padded(plan.token_ids, 0), non_blocking=True)", "pass"),
    "positions": ("self._positions.copy_(padded(plan.positions, 0), non_blocking=True)", "pass"),
    "how far a token sees": (
        "self._seen.copy_(padded(plan.positions, -1), non_blocking=True)", "pass",
    ),
    "slots": ("self._slots.copy_(padded(plan.slot_mapping, -1), non_blocking=True)", "pass"),
    "tiles": ("self._tiles.copy_(torch.from_numpy(tiles), non_blocking=True)", "pass"),
    "tables": ("own.copy_(", "(lambda *_, **__: None)("),
    "padding is stored": ("padded(plan.slot_mapping, -1)", "padded(plan.slot_mapping, 0)"),
    "one position too far": ("padded(plan.positions, -1)", "padded(plan.positions + 1, -1)"),
    "windows": ("replace(layout, window=window) for window in windows", "layout for window in windows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_buffer_that_a_replay_does_not_fill_is_found(
    engine: TorchTargetEngine, recorder: TapeRecorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = mutant(paged_step, *BROKEN[name])
    monkeypatch.setattr(paged_step, "StaticInputs", broken.StaticInputs)
    with pytest.raises((AssertionError, IndexError)):
        check(engine, paged(engine, recorder))


def test_the_tier_of_a_step_follows_from_its_bound_alone(engine: TorchTargetEngine) -> None:
    forward = paged(engine, None)
    rows = TrialSequences(engine, [np.arange(50), np.arange(50)])
    few, many = rows.plan({0: 1, 1: 1}, rounds=True), rows.plan({0: 5, 1: 3}, rounds=True)
    assert forward.tier_of(replace(few, token_bound=10)) == 12
    assert forward.tier_of(replace(many, token_bound=10)) == 12
    assert forward.tier_of(replace(few, token_bound=0)) is None
    chunk = rows.plan({0: 6})
    assert forward.tier_of(replace(chunk, token_bound=10)) is None


def test_a_failed_capture_is_counted_and_steps_run_on(
    engine: TorchTargetEngine, caplog: pytest.LogCaptureFixture
) -> None:
    forward = paged(engine, RefusingRecorder())
    check(engine, forward)
    assert forward.num_capture_failures == 1
    assert "could not be captured" in caplog.text


@pytest.mark.parametrize("normalise", [True, False])
def test_stacked_experts_are_the_same_layer(normalise: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    router = TopKRouter(Linear(torch.randn(4, 16, generator=rng)), 2, normalise)
    gate, up = (torch.randn(4, 12, 16, generator=rng) * 0.3 for _ in range(2))
    down = torch.randn(4, 16, 12, generator=rng) * 0.3
    loose = [GatedMlp(*weights) for weights in zip(gate, up, down, strict=True)]
    x = torch.randn(9, 16, generator=rng)
    want = MoeLayer(router, ExpertList(loose, 1))(x)
    found = MoeLayer(router, ExpertStacks(gate, up, down))(x)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_a_tiled_product_is_the_plain_one() -> None:
    rng = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(s, generator=rng) for s in ((5, 8), (5,), (3, 8)))
    tiled = TiledLinear(weight.bfloat16(), bias.bfloat16())
    tiled.is_packed = False  # as on a GPU
    tiled._weight = weight.bfloat16()
    want = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    torch.testing.assert_close(tiled(x.bfloat16()), want, atol=0.1, rtol=0.05)


def test_a_machine_without_triton_still_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.chosen.cache_clear()
    monkeypatch.setattr(dispatch, "triton_version", lambda: None)
    assert {dispatch.implementation(op, "cuda") for op in dispatch.OPS} == {"reference"}
    assert all(callable(dispatch.chosen(op, "cuda")) for op in dispatch.OPS)
    assert "install Triton" in dispatch.describe("cuda")
    dispatch.chosen.cache_clear()


def test_without_triton_a_gpu_serves_with_padded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paged twin loops over tokens: it specifies the kernel, and nobody is to be served by it."""
    monkeypatch.setattr(dispatch, "triton_version", lambda: None)
    assert dispatch.implementation("attend_paged", "cuda") == "reference"
    monkeypatch.setattr(dispatch, "implementation", lambda op, kind: "triton")
    assert tiny_engine("cpu").paged is not None
    monkeypatch.undo()
    assert tiny_engine("cpu").paged is None


def test_the_kernel_is_chosen_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_version", lambda: "9.9")
    assert {dispatch.implementation(op, "cuda") for op in dispatch.OPS} == {"triton"}
    assert {dispatch.implementation(op, "cpu") for op in dispatch.OPS} == {"reference"}
    assert dispatch.describe("cuda") == "kernels on cuda: Triton 9.9"
