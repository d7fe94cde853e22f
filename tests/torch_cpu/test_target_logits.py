"""The target computes what transformers computes, however a sequence is cut into steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine import packed_linear
from actors.engine.trial import TrialSequences
from tests.torch_cpu.oracle_models import NAMES, TAPS, engine_of, expected, shuffled

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# Each step: tokens of each row. Odd chunks of prompt, chunks beside decoding rows, single tokens, ragged rounds.
SCHEDULES = {
    "whole prompts": [{0: 61}, {1: 9, 2: 34, 3: 48, 4: 23}],
    "odd chunks, then decode": [
        {0: 7, 2: 12, 4: 1},
        {0: 29, 1: 3, 2: 5, 3: 17, 4: 11},
        {0: 11, 1: 1, 2: 13, 3: 27, 4: 7},
        *[{0: 1, 1: 1, 2: 1, 3: 1, 4: 1}] * 4,
        {0: 10, 1: 1},
    ],
    "ragged rounds in one batch": [
        {0: 21, 1: 2, 2: 8, 3: 40, 4: 3},
        {0: 6, 1: 1, 2: 3, 3: 4, 4: 2},
        {0: 2, 1: 6, 2: 6, 3: 1, 4: 5},
        {0: 1, 2: 4, 3: 3, 4: 6},
        {0: 31, 2: 1, 4: 6},
    ],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("numerics", ["reproducible", "fast"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(
    oracle_models: Path, name: str, numerics: str, schedule: str
) -> None:
    want = expected(oracle_models / name)
    rows = shuffled(engine_of(oracle_models / name, numerics=numerics), want.token_ids)
    for step in SCHEDULES[schedule]:
        starts = rows.length.copy()
        for row, found in zip(step, rows.logits(step), strict=True):
            span = slice(starts[row], starts[row] + step[row])
            assert (found - want.logits[row][span]).abs().max() < TOLERANCE, (row, span)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3_moe"])
def test_without_packed_weights_too(
    oracle_models: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other devices run: plain products, gate and up in one."""
    monkeypatch.setattr(packed_linear, "packs", lambda _weight: False)
    want = expected(oracle_models / name)
    rows = shuffled(engine_of(oracle_models / name, numerics="fast"), want.token_ids)
    found = torch.cat([rows.logits({0: n})[0] for n in (30, 1, 6, 24)])
    assert (found - want.logits[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_raw_outputs_of_the_tapped_layers(oracle_models: Path, name: str) -> None:
    want = expected(oracle_models / name)
    engine = engine_of(oracle_models / name)
    rows = shuffled(engine, want.token_ids)
    for step in ({0: 30, 3: 5}, {0: 1, 3: 4}):
        starts = rows.length.copy()
        features = engine.step(rows.plan(step)).features
        assert features is not None and features.dtype == np.float32
        assert features.shape[1] == engine.spec.feature_dim
        wanted = np.concatenate(
            [want.taps[row][starts[row] : starts[row] + n] for row, n in step.items()]
        )
        assert np.abs(features - wanted).max() < TOLERANCE


def test_taps_come_in_the_order_asked_for(oracle_models: Path) -> None:
    want = expected(oracle_models / "llama")
    found = {}
    for taps in (TAPS, TAPS[::-1]):
        engine = engine_of(oracle_models / "llama", taps=taps)
        found[taps] = engine.step(TrialSequences(engine, want.token_ids).plan({0: 5})).features
    hidden = engine.spec.hidden_size
    assert found[TAPS] is not None and found[TAPS[::-1]] is not None
    assert np.array_equal(found[TAPS][:, :hidden], found[TAPS[::-1]][:, hidden:])


def test_without_taps_there_are_no_features(oracle_models: Path) -> None:
    engine = engine_of(oracle_models / "llama", taps=())
    rows = TrialSequences(engine, expected(oracle_models / "llama").token_ids)
    assert engine.step(rows.plan({0: 3})).features is None


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_greedy_rounds_commit_what_transformers_would_choose(
    oracle_models: Path, name: str
) -> None:
    want = expected(oracle_models / name)
    engine = engine_of(oracle_models / name)
    choices = [logits.argmax(-1).numpy() for logits in want.logits]
    # Row 3's drafts are transformers' own choices as far as they go: its text follows them for two tokens.
    rows = shuffled(engine, want.token_ids)
    result = engine.step(rows.plan({0: 17, 3: 20}))
    assert result.next_token.tolist() == [choices[0][16], choices[3][19]]
    assert result.num_accepted.tolist() == [0, 0]
    drafts = want.token_ids[3][20:26]
    follows = choices[3][20:25] == drafts[1:]
    accepted = int(follows.cumprod().sum())
    result = engine.step(rows.plan({3: 6}, rounds=True))
    assert result.num_accepted.tolist() == [accepted]
    assert result.next_token.tolist() == [choices[3][20 + accepted]]


def test_a_chunk_inside_a_prompt_yields_no_token(oracle_models: Path) -> None:
    engine = engine_of(oracle_models / "llama")
    rows = TrialSequences(engine, expected(oracle_models / "llama").token_ids)
    plan = rows.plan({0: 5, 3: 2})
    plan.samples[0] = False
    result = engine.step(plan)
    assert result.next_token[0] == -1 and result.next_token[1] >= 0
    plan.samples[1] = False
    assert engine.step(plan).next_token.tolist() == [-1, -1]


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_any_block_size_serves(oracle_models: Path, block_size: int) -> None:
    want = expected(oracle_models / "qwen3")
    rows = shuffled(engine_of(oracle_models / "qwen3", block_size=block_size), want.token_ids[:2])
    for step in ({0: 23, 1: 4}, {0: 1, 1: 5}, {0: 37}):
        starts = rows.length.copy()
        for row, found in zip(step, rows.logits(step), strict=True):
            span = slice(starts[row], starts[row] + step[row])
            assert (found - want.logits[row][span]).abs().max() < TOLERANCE


def test_bfloat16_is_close(oracle_models: Path) -> None:
    want = expected(oracle_models / "llama")
    engine = engine_of(oracle_models / "llama", dtype="bfloat16")
    found = TrialSequences(engine, want.token_ids).logits({0: 61})[0].float()
    error = (found - want.logits[0]).norm() / want.logits[0].norm()
    assert 1e-5 < error < 0.05
    features = engine.step(TrialSequences(engine, want.token_ids).plan({0: 61})).features
    assert features is not None and features.dtype == np.uint16
    values = torch.from_numpy(features.view(np.int16)).view(torch.bfloat16).float()
    assert (values - want.taps[0]).norm() / want.taps[0].norm() < 0.05
