"""Measuring: shapes and bounds. Times themselves are the machine's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.engine import bench
from configs.schema import ClusterConfig


@pytest.fixture
def config(oracle_models: Path) -> ClusterConfig:
    torch.set_num_threads(1)
    return ClusterConfig.model_validate(
        {
            "model": {"path": str(oracle_models / "llama"), "max_model_len": 256},
            "target": {"kv_cache_tokens": 1024, "max_running": 6, "max_batch_tokens": 24},
        }
    )


def test_plain_decoding_is_reported_by_batch_size(config: ClusterConfig) -> None:
    lines: list[str] = []
    report = json.loads(json.dumps(bench.run(config, (1, 4), lines.append)))
    assert set(report["tokens_per_s"]) == {"1", "4"} == set(report["breakdown_ms"])
    for size in ("1", "4"):
        rate = int(size) / report["step_ms"][size] * 1e3
        assert report["tokens_per_s"][size] == pytest.approx(rate, rel=0.05)
        parts = report["breakdown_ms"][size]
        assert set(parts) == {"linears", "head", "attention", "norms", "step", "other"}
    assert len(lines) == 5 and "linears" in lines[-1]


def test_the_curve_covers_what_a_rank_can_be_asked_for(config: ClusterConfig) -> None:
    from actors.engine.target_engine import load_engine

    engine = load_engine(config)
    tokens, requests, seconds = bench.profile_step_times(engine, config)
    assert len(tokens) == len(requests) == len(seconds) == len(bench.profile_points(config))
    assert (tokens[:-1] <= tokens[1:]).all() and (seconds > 0).all()
    assert tokens.min() == 1 and tokens.max() <= 24
    assert set(requests.tolist()) == {1, 2, 4, 6}
    assert ((tokens % requests) == 0).all()


def test_a_machine_too_slow_for_the_whole_curve_gets_its_corners(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from actors.engine.target_engine import load_engine

    monkeypatch.setattr(bench, "PROFILE_BUDGET_S", 0.0)
    tokens, _, _ = bench.profile_step_times(load_engine(config), config)
    assert len(tokens) == bench.MIN_PROFILE_POINTS
    assert "measured in" in caplog.text
    corners = [(1, 1), (1, 6), (6, 1)]  # (6, 6) is more than a step of this rank may hold
    assert bench.profile_points(config)[:3] == corners
    assert {1, 6} <= set(tokens.tolist())
