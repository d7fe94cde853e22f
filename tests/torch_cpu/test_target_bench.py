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
