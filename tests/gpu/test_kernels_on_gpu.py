"""On a GPU: kernels against twins in served shapes, the engine against the CPU, replayed steps against eager ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engine.trial import TrialSequences
from kernels import bench_cases
from tests.torch_cpu.tiny_target import tiny_engine

CASES = bench_cases.cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_kernel_agrees_with_its_twin_in_a_served_shape(case: bench_cases.Case) -> None:
    torch.manual_seed(0)
    kernel, twin = case.build(torch.device("cuda"))
    found, wanted = kernel(), twin()
    if case.op in ("verify", "sample_block"):
        # Sums round differently: a draw next to a step of the distribution may fall on its other side.
        assert (found[0] == wanted[0]).float().mean() > 0.98
        return
    pairs = (
        [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.float(), theirs.float(), atol=0.05, rtol=0.05)


def test_engine_on_the_gpu_makes_the_steps_of_the_cpu() -> None:
    ids = [np.random.default_rng(row).integers(0, 60, 60) for row in range(3)]
    here, there = (TrialSequences(tiny_engine(device), ids) for device in ("cuda", "cpu"))
    for query_len in ({0: 17, 1: 1, 2: 30}, {0: 4, 1: 1, 2: 2}, {1: 3}):
        for ours, theirs in zip(here.logits(query_len), there.logits(query_len), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=1e-3)


def test_replayed_steps_equal_eager_ones() -> None:
    engine = tiny_engine("cuda")
    rows = TrialSequences(engine, [np.arange(60) % 60, np.arange(60)[::-1] % 60])
    assert engine.paged is not None
    engine.step(rows.plan({0: 17, 1: 9}))
    for query_len in ({0: 3, 1: 1}, {0: 1, 1: 4}, {1: 2}):
        plan = replace(rows.plan(query_len, rounds=True), token_bound=8)
        replayed = engine.step(plan)
        eager = engine.step(replace(plan, token_bound=0))
        assert np.array_equal(replayed.next_token, eager.next_token)
        assert np.array_equal(replayed.num_accepted, eager.num_accepted)
        assert np.array_equal(replayed.features, eager.features)
    assert engine.paged.num_replays == 3
    assert engine.paged.num_capture_failures == 0


def test_reproducible_rows_have_the_same_bits_in_any_company() -> None:
    assert tiny_engine("cuda").check_row_invariance()
