"""Rejected drafts leave nothing behind, and rows do not see each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import TrialSequences
from tests.torch_cpu.oracle_models import engine_of, expected, shuffled

PROMPT = 19
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequential(engine: TorchTargetEngine, ids: np.ndarray) -> Tensor:
    """Logits of every token after the prompt, one step each."""
    rows = TrialSequences(engine.sibling(engine.store.num_blocks), [ids])
    rows.logits({0: PROMPT})
    return torch.cat([rows.logits({0: 1})[0] for _ in range(len(ids) - PROMPT)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mixtral", "mistral", "qwen3_layer_types"])
def test_after_a_rejection_the_row_goes_on_as_if_nothing_had_been_drafted(
    oracle_models: Path, name: str, dtype: str
) -> None:
    engine = engine_of(oracle_models / name, dtype=dtype)
    true_ids = expected(oracle_models / name).token_ids[0]
    want = sequential(engine, true_ids)
    rows = shuffled(engine, [true_ids.copy()])
    rows.logits({0: PROMPT})
    generator = np.random.default_rng(5)
    for drafted, accepted in ((5, 0), (5, 2), (3, 3), (5, 1), (1, 0), (5, 4)):
        start = int(rows.length[0])
        rows.token_ids[0][start + accepted + 1 : start + drafted + 1] = generator.integers(
            3, 100, drafted - accepted
        )
        found = rows.logits({0: drafted + 1})[0]
        kept = slice(start - PROMPT, start - PROMPT + accepted + 1)
        assert torch.equal(found[: accepted + 1], want[kept]), (drafted, accepted)
        rows.length[0] = start + accepted + 1
        rows.token_ids[0][:] = true_ids


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beyond_the_context_changes_nothing(oracle_models: Path, dtype: str) -> None:
    """Whatever rejected drafts or earlier owners of a block left there."""
    engine = engine_of(oracle_models / "llama", dtype=dtype)
    ids = expected(oracle_models / "llama").token_ids[:3]
    found = []
    for poison in (0.0, 1e4, -1e4):
        rows = shuffled(engine, ids)
        for layer in range(engine.spec.num_layers):
            slots = torch.arange(engine.store.num_blocks * engine.store.block_size)
            shape = (len(slots), 2 * engine.store.num_kv_heads, engine.store.head_dim)
            engine.store.write(layer, slots, torch.full(shape, poison, dtype=engine.model.dtype))
        rows.logits({0: 13, 1: 2, 2: 11})
        found.append(torch.cat(rows.logits({0: 5, 1: 1, 2: 17})))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_the_blocks_lie_changes_nothing(oracle_models: Path, dtype: str) -> None:
    engine = engine_of(oracle_models / "qwen3", dtype=dtype)
    ids = expected(oracle_models / "qwen3").token_ids
    found = []
    for make in (TrialSequences, shuffled):
        rows = make(engine, ids)
        rows.logits({0: 31, 2: 8})
        found.append(torch.cat(rows.logits({0: 6, 2: 1, 1: 9})))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_prefix_blocks_serve_two_rows(oracle_models: Path, dtype: str) -> None:
    engine = engine_of(oracle_models / "llama", dtype=dtype, block_size=8)
    ids = expected(oracle_models / "llama").token_ids[0]
    want = sequential(engine, ids)
    rows = shuffled(engine, [ids, ids])
    rows.logits({0: 16})
    rows.block_tables[1, :2] = rows.block_tables[0, :2]
    rows.length[1] = 16
    first, second = rows.logits({0: 9, 1: 12})
    assert torch.equal(first[3:], want[:6]) and torch.equal(second[3:], want[:9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["llama", "llama_biased", "qwen3", "qwen3_moe", "mixtral", "mistral"]
)
def test_reproducible_rows_are_bitwise_independent_of_the_batch(
    oracle_models: Path, name: str, dtype: str
) -> None:
    assert engine_of(oracle_models / name, dtype=dtype).check_row_invariance()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_any_cut_are_bitwise_equal(oracle_models: Path, dtype: str) -> None:
    length = 250  # sums over more than 192 keys are split by some products, unless they are cut into tiles
    want = expected(oracle_models / "llama").token_ids
    ids = [np.resize(want[row], length) for row in range(3)]
    reference: dict[int, Tensor] = {}
    generator = np.random.default_rng(3)
    engine = engine_of(oracle_models / "llama", dtype=dtype, max_model_len=256)
    for trial in range(6):
        rows = shuffled(engine, ids)
        pieces: dict[int, list[Tensor]] = {row: [] for row in range(3)}
        while (rows.length < length).any():
            left = length - rows.length
            most = (1, 4, length)[trial % 3]
            if trial == 0:  # one row after the other, token by token
                own = [int(np.flatnonzero(left)[0])]
            else:
                own = [r for r in range(3) if left[r] and generator.random() < 0.7]
            step = {r: int(generator.integers(1, min(most, left[r]) + 1)) for r in own}
            if step:
                for row, found in zip(step, rows.logits(step), strict=True):
                    pieces[row].append(found)
        for row, found in pieces.items():
            reference.setdefault(row, torch.cat(found))
            assert torch.equal(torch.cat(found), reference[row]), (trial, row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(oracle_models: Path, dtype: str) -> None:
    engine = engine_of(oracle_models / "llama", dtype=dtype)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows = shuffled(engine, expected(oracle_models / "llama").token_ids)
        rows.logits({0: 30, 3: 40})
        found.append(torch.cat(rows.logits({0: 6, 1: 5, 3: 1})))
    assert torch.equal(*found)


@pytest.mark.parametrize("fault", ["rows", "query"])
def test_the_check_notices_rows_that_depend_on_others(
    oracle_models: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more bit in one weight product, depending on how many rows it has."""
    engine = engine_of(oracle_models / "llama")
    linear = engine.model.layers[1].output
    honest = linear.plus
    limit = 8 if fault == "rows" else 3

    def dishonest(x: Tensor, residual: Tensor) -> Tensor:
        return honest(x * (1.0 + 2.0**-20 if len(x) > limit else 1.0), residual)

    monkeypatch.setattr(linear, "plus", dishonest)
    assert not engine.check_row_invariance()


def test_the_check_leaves_the_cache_alone(oracle_models: Path) -> None:
    engine = engine_of(oracle_models / "llama")
    rows = TrialSequences(engine, expected(oracle_models / "llama").token_ids)
    rows.logits({0: 20})
    every = engine.store.rows_of(torch.arange(engine.store.num_blocks))
    before = engine.store.read(0, every)[0].clone()
    assert before.any()
    engine.check_row_invariance()
    assert torch.equal(engine.store.read(0, every)[0], before)
