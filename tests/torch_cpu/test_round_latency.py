"""What a round costs by block length: the drafter's process drafts as its engine does, and growth is told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.checkpoint import load_drafter, save_drafter
from actors.engine.drafters.trial import trial_commit
from actors.engine.training.drafter_process import DrafterProcess, engine_of_length
from actors.engine.training.latency import Latency, Turn
from actors.engine.training.recorded_requests import RecordedRequests
from actors.engine.weights import embedding_tables
from tests.torch_cpu.rank_engines import real_drafter_model, write_tiny_llama

pytestmark = pytest.mark.timeout(300)

LENGTHS = (3, 6)
NAMES = ("a", "b")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    save_drafter(real_drafter_model(3), tmp_path / "drafter")
    return tmp_path


def test_the_process_drafts_what_its_engine_drafts_at_every_length(folder: Path) -> None:
    model = load_drafter(folder / "drafter", *embedding_tables(folder, torch.float32))
    sampling = SamplingBatch.of([SamplingParams(noise_key=i) for i in range(len(NAMES))])
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2 * 9, model.config.feature_dim)).astype(np.float32)
    commits = trial_commit(NAMES, 0, 10, features, sampling)
    with DrafterProcess(folder / "drafter", folder, LENGTHS, torch.float32) as process:
        for gamma in LENGTHS:
            found, processor_s = process.advance(gamma, commits)
            assert processor_s > 0
            own = engine_of_length(model, gamma, torch.float32).advance(commits)
            assert own is not None
            assert found.draft_token_ids.shape == (2, gamma)
            np.testing.assert_array_equal(found.draft_token_ids, own.draft_token_ids)
            np.testing.assert_allclose(found.q_probs, own.q_probs, atol=1e-6)


def test_a_process_that_cannot_start_or_dies_is_an_error(folder: Path) -> None:
    (folder / "drafter" / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        DrafterProcess(folder / "drafter", folder, LENGTHS, torch.float32).__enter__()


def test_growth_is_of_each_repeat_and_not_of_the_drift_between_them() -> None:
    """Every repeat is twice as slow as the one before; a longer block always adds a tenth."""
    whole = [1.0, 2.0, 4.0, 8.0]
    turns = {
        4: [Turn(0.1 * s, 0.8 * s, s, 2 * s) for s in whole],
        7: [Turn(0.1 * s, 0.8 * s, s, 2 * s) for s in whole],
        16: [Turn(0.2 * s, 0.8 * s, 1.1 * s, 2.4 * s) for s in whole],
    }
    report = Latency(16, 7, turns).report()
    assert report["round_growth"] == {"from": 4, "to": 16, "share": 0.1, "low": 0.1, "high": 0.1}
    assert report["processor_time_growth"]["share"] == 0.2
    assert report["draft_share_of_round"]["16"] == pytest.approx(0.2 / 1.1, abs=1e-4)
    assert report["round_ms_by_gamma"] == {"4": 3000.0, "7": 3000.0, "16": 3300.0}
    assert "round_growth" not in Latency(16, 1, {1: turns[4]}).report()


def test_rounds_that_stop_are_told_apart_and_held_against_whole_ones() -> None:
    whole = {g: [Turn(0.1, 0.8, s, s, g) for s in (1.0, 2.0)] for g in (4, 16)}
    short = {g: [Turn(0.1, 0.8, s / 2, s / 2, 3.0) for s in (1.0, 2.0)] for g in (4, 16)}
    report = Latency(16, 7, whole, {0.1: short}, is_recorded=True).report()
    assert report["text"] == "recorded"
    found = report["by_price"]["0.1"]
    assert found["drafted_by_gamma"] == {"4": 3.0, "16": 3.0}
    assert found["round_ratio_to_whole"] == {"4": 0.5, "16": 0.5}
    assert found["round_growth"]["share"] == 0.0


def test_recorded_requests_walk_their_text_two_tokens_a_turn() -> None:
    ids = [torch.arange(100, 160), torch.arange(200, 260)]
    features = [torch.arange(60.0)[:, None] + 1000 * i for i in range(2)]
    requests = RecordedRequests(ids, features, [10, 20])
    for turn, (first, committed) in enumerate([((0, 0), (10, 20)), ((9, 19), (12, 22))]):
        commit = requests.commits("a", turn, 0.05)
        assert commit.first_positions.tolist() == list(first)
        assert commit.committed_lens.tolist() == list(committed)
        assert commit.anchor_token_ids.tolist() == [100 + committed[0] - 1, 200 + committed[1] - 1]
        rows = [*range(first[0], committed[0] - 1), *range(first[1] + 1000, committed[1] + 999)]
        assert commit.features[:, 0].tolist() == rows
        assert commit.cu_feature_len.tolist()[-1] == len(rows) == len(commit.token_ids)
        assert commit.min_survivals.tolist() == [np.float32(0.05)] * 2
