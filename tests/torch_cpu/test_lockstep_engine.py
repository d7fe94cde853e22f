"""Engines of a group step together: the bits of one engine with all parts, whoever is idle, over threads and gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.core.lockstep import CollectiveError, LockstepError, StepLayout
from actors.engine import target_engine
from actors.engine.collective import Collective, DistributedCollective, open_store
from actors.engine.expert_group import ExpertGroup
from actors.engine.sharded_experts import DISPATCH_MODES
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import TrialSequences
from actors.engine.weights import Checkpoint, CheckpointError
from tests.torch_cpu.oracle_models import engine_of, expected
from tests.torch_cpu.thread_ranks import Board, ThreadCollective, on_ranks

# What each rank runs in each step: tokens by row. Ranks are idle, prefill, decode and verify beside each other.
SCHEDULE: list[dict[int, dict[int, int]]] = [
    {0: {0: 17}},
    {1: {1: 5, 2: 11}},
    {0: {0: 1}, 1: {1: 1, 2: 1}, 2: {3: 30}},
    {2: {3: 1}, 3: {4: 1}},
    {0: {0: 6}, 1: {1: 1}, 2: {3: 3}, 3: {4: 1}},
    {3: {4: 13}},
]


def engine_in(model_dir: Path, collective: Collective, mode: str) -> TorchTargetEngine:
    group = ExpertGroup(collective.rank, collective.size)
    group.attach(collective)
    return engine_of(model_dir, group=group, dispatch=mode)


def steps_of(
    engine: TorchTargetEngine, token_ids: list[np.ndarray], rank: int, size: int
) -> list[Tensor]:
    """The rank's part of SCHEDULE, in which what is another rank's beyond `size` falls to the last one."""
    rows, found = TrialSequences(engine, token_ids), []
    for step in SCHEDULE:
        own: dict[int, int] = {}
        for whose, part in step.items():
            if min(whose, size - 1) == rank:
                own |= part
        if own:
            found += rows.logits(own)
        elif size > 1:
            assert engine.join().runs
    return found


def whole(model_dir: Path, size: int, *, in_slices: bool = False) -> list[list[Tensor]]:
    """The same steps by engines that have all experts, or all slices of a dense model, rank by rank."""
    ids = expected(model_dir).token_ids

    def engine() -> TorchTargetEngine:
        if not in_slices:
            return engine_of(model_dir)
        return engine_in(model_dir, Board(1).collectives()[0], "all_gather")

    return [steps_alone(engine(), ids, rank, size) for rank in range(size)]


def steps_alone(
    engine: TorchTargetEngine, ids: list[np.ndarray], rank: int, size: int
) -> list[Tensor]:
    engine.join = lambda **_: type("Ran", (), {"runs": True})()  # type: ignore[assignment, method-assign]
    return steps_of(engine, ids, rank, size)


@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe_unnormalised"])
def test_a_group_computes_what_one_rank_with_all_experts_does(
    oracle_models: Path, name: str, size: int, mode: str
) -> None:
    folder = oracle_models / name
    torch.set_num_threads(1)
    want = whole(folder, size)
    ids = expected(folder).token_ids

    def rank(collective: ThreadCollective) -> list[Tensor]:
        return steps_of(engine_in(folder, collective, mode), ids, collective.rank, size)

    found, _ = on_ranks(size, rank)
    for ours, theirs in zip(found, want, strict=True):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("mode", DISPATCH_MODES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen2", "qwen3"])
def test_a_group_that_shares_a_dense_model_computes_what_one_rank_does(
    oracle_models: Path, name: str, size: int, mode: str
) -> None:
    """Bit for bit what one rank makes of the same slices; up to rounding what the whole feed-forward gives."""
    folder = oracle_models / name
    torch.set_num_threads(1)
    ids = expected(folder).token_ids

    def rank(collective: ThreadCollective) -> list[Tensor]:
        return steps_of(engine_in(folder, collective, mode), ids, collective.rank, size)

    found, _ = on_ranks(size, rank)
    in_slices, plain = whole(folder, size, in_slices=True), whole(folder, size)
    for ours, theirs, uncut in zip(found, in_slices, plain, strict=True):
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for a, b in zip(ours, uncut, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
            assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama_biased", "qwen2"])
def test_sharded_experts_equal_transformers(oracle_models: Path, name: str) -> None:
    want = expected(oracle_models / name)

    def rank(collective: ThreadCollective) -> Tensor:
        engine = engine_in(oracle_models / name, collective, "all_to_all")
        rows = TrialSequences(engine, want.token_ids)
        return torch.cat([rows.logits({collective.rank: n})[0] for n in (5, 1, 3)])

    for found, logits in zip(on_ranks(2, rank)[0], want.logits[:2], strict=True):
        assert (found - logits[:9]).abs().max() < 1e-4


def test_a_rank_reads_only_its_own_experts(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Recording(Checkpoint):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    monkeypatch.setattr(target_engine, "Checkpoint", Recording)
    engine_of(oracle_models / "mixtral", group=ExpertGroup(1, 2))
    seen = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert seen == {2, 3}
    assert any("gate.weight" in name for name in read)


def test_a_rank_of_a_dense_group_reads_only_its_own_slices(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_names: list[str] = []
    parts: dict[str, set[tuple[int, int, int]]] = {}

    class Recording(Checkpoint):
        def __getitem__(self, name: str) -> Tensor:
            whole_names.append(name)
            return super().__getitem__(name)

        def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
            parts.setdefault(name.split(".mlp.")[1], set()).add((dim, start, stop))
            return super().part(name, dim, start, stop)

    monkeypatch.setattr(target_engine, "Checkpoint", Recording)
    engine_of(oracle_models / "llama_biased", group=ExpertGroup(1, 2))
    # The intermediate width is 96: rank 1 of 2 has the last two of four slices.
    rows, columns = {(0, 48, 72), (0, 72, 96)}, {(1, 48, 72), (1, 72, 96)}
    kinds = ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias")
    assert parts == {**dict.fromkeys(kinds, rows), "down_proj.weight": columns}
    assert not [name for name in whole_names if ".mlp." in name]


def test_a_dense_group_has_no_experts_to_move(oracle_models: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rebalance_steps=9.*no experts to move"):
        engine_of(
            oracle_models / "llama",
            group=ExpertGroup(0, 2),
            group_size=2,
            num_ranks=2,
            rebalance_steps=9,
        )


def test_a_group_larger_than_the_number_of_experts_is_refused(oracle_models: Path) -> None:
    with pytest.raises(CheckpointError, match=r"group_size=5.*has 4 experts"):
        engine_of(oracle_models / "mixtral", group=ExpertGroup(0, 5))
    with pytest.raises(
        CheckpointError, match=r"97.*has 96 columns in a feed-forward to share; use at"
    ):
        engine_of(oracle_models / "llama", group=ExpertGroup(0, 97))


def test_rows_are_invariant_in_a_group_too(oracle_models: Path) -> None:
    def rank(collective: ThreadCollective) -> bool:
        engine = engine_in(oracle_models / "mixtral", collective, "all_gather")
        group = engine.model.sharding.group  # type: ignore[union-attr]
        if collective.rank:
            while engine.join().is_led:
                pass
            return True
        group.is_leading = True
        verdict = engine.check_row_invariance()
        group.is_leading = False
        assert not engine.join().runs  # the word that the others are free
        return verdict

    assert on_ranks(2, rank)[0] == [True, True]


def over_gloo(size: int, work: Callable[[Collective], Any], bound_s: float = 30.0) -> list[Any]:
    """`work` of every rank over real gloo groups, which may all live in one process."""
    store, address = open_store("127.0.0.1")

    def rank(thread: ThreadCollective) -> Any:
        return work(DistributedCollective.join(address, 1, thread.rank, size, bound_s, bound_s))

    found = on_ranks(size, rank)[0]
    del store
    return found


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_a_group_over_gloo_gives_the_same_bits(oracle_models: Path, mode: str) -> None:
    folder = oracle_models / "mixtral"
    torch.set_num_threads(1)
    want, ids = whole(folder, 2), expected(folder).token_ids

    def rank(collective: Collective) -> list[Tensor]:
        return steps_of(engine_in(folder, collective, mode), ids, collective.rank, 2)

    for ours, theirs in zip(over_gloo(2, rank), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def skips_the_experts(engine: TorchTargetEngine) -> None:
    engine.model.join = lambda: None  # type: ignore[method-assign]


def skips_the_vote(engine: TorchTargetEngine) -> None:
    engine.join = lambda **_: engine.group.layout  # type: ignore[method-assign]


def lays_out_by_itself(engine: TorchTargetEngine) -> None:
    """As if its own confidences told it how many tokens the other rank has."""
    agree = engine.group.agree

    def own_view(*arguments: Any, **options: Any) -> StepLayout:
        layout = agree(*arguments, **options)
        engine.group.layout = replace(layout, num_tokens=(layout.num_tokens[0] + 1, 0))
        return engine.group.layout

    engine.group.agree = own_view  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        *itertools.product([skips_the_experts, skips_the_vote], DISPATCH_MODES),
        (lays_out_by_itself, "all_gather"),  # all_to_all takes no shape from the layout
    ],
)
def test_an_idle_rank_that_parts_from_its_group_is_found_within_the_bound(
    oracle_models: Path, fault: Callable[[TorchTargetEngine], None], mode: str
) -> None:
    """Faults that the tests above and of the matrix would find."""
    folder, bound_s = oracle_models / "mixtral", 1.0
    ids = expected(folder).token_ids

    def rank(collective: ThreadCollective) -> None:
        engine = engine_in(folder, collective, mode)
        if collective.rank:
            fault(engine)
        rows = TrialSequences(engine, ids)
        for _ in range(3):
            if collective.rank:
                engine.join()
            else:
                rows.logits({0: 2})

    with pytest.raises((CollectiveError, LockstepError, AssertionError, RuntimeError)):
        on_ranks(2, rank, bound_s)
