"""How much work a step is: what keeps the engine fast, in counts that do not depend on the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engine.trial import TrialSequences
from tests.torch_cpu.oracle_models import engine_of, expected


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def ops_of(rows: TrialSequences, step: dict[int, int], rounds: bool) -> int:
    plan = rows.plan(step, rounds=rounds)
    with CountedOps() as ops:
        rows.engine.step(plan)
    return ops.count


@pytest.mark.parametrize("query_len", [1, 4])
def test_more_requests_are_not_more_operations(oracle_models: Path, query_len: int) -> None:
    """No loop over requests or tokens, from the plan to the accepted lengths."""
    ids = expected(oracle_models / "llama").token_ids[0]
    rows = TrialSequences(engine_of(oracle_models / "llama"), [ids] * 14)
    for row in range(14):
        rows.logits({row: 5})
    counts = {
        size: ops_of(rows, dict.fromkeys(range(size), query_len), query_len > 1)
        for size in (2, 3, 14)
    }
    assert len(set(counts.values())) == 1, counts


def test_a_long_prompt_is_not_more_operations(oracle_models: Path) -> None:
    ids = expected(oracle_models / "llama").token_ids[0]
    rows = TrialSequences(engine_of(oracle_models / "llama"), [ids, ids])
    assert ops_of(rows, {0: 12}, False) == ops_of(rows, {1: 60}, False)


def test_the_head_sees_only_rows_that_decide_a_token(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(oracle_models / "llama")
    rows = TrialSequences(engine, expected(oracle_models / "llama").token_ids)
    honest, seen = engine.model.head.__call__, []

    class Watched:
        def __call__(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return honest(x)

    monkeypatch.setattr(engine.model, "head", Watched())
    plan = rows.plan({0: 20, 2: 30})
    plan.samples[0] = False
    engine.step(plan)
    engine.step(rows.plan({0: 4, 2: 1}, rounds=True))
    plan = rows.plan({0: 7})
    plan.samples[0] = False
    engine.step(plan)
    assert seen == [2, 5]  # a lone row is computed twice in `reproducible`; no row, no head
