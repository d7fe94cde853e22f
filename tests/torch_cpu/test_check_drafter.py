"""New weights are looked at before a rollout touches anything: what fits says what it reads, the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.drafters.serve import check_drafter
from actors.engine.weights import CheckpointError
from configs.schema import ClusterConfig
from tests.torch_cpu.rank_engines import TAPS, real_drafter_model, write_tiny_llama


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    write_tiny_llama(tmp_path / "target")
    save_drafter(real_drafter_model(3), tmp_path / "drafter")
    return tmp_path


def config(models: Path, drafter: str | None, gamma: int = 3) -> ClusterConfig:
    model = {"path": str(models / "target"), "drafter": drafter, "dtype": "float32"}
    model |= {"max_model_len": 128, "device": "cuda"}  # the head of a cluster has no GPU
    gpus = {"num_gpus": 1.0}
    return ClusterConfig.model_validate(
        {"model": model, "drafter": {"gamma": gamma, **gpus}, "target": gpus}
    )


def declare(models: Path, **changes: Any) -> None:
    path = models / "drafter" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_drafter_that_fits_says_what_it_reads_and_that_it_is_not_calibrated(models: Path) -> None:
    found = check_drafter(config(models, str(models / "drafter")))
    assert tuple(found["taps"]) == TAPS
    (remark,) = found["remarks"]
    assert "calibration.json" in remark and "dspark calibrate" in remark


@pytest.mark.parametrize("drafter", ["ngram", None])
def test_what_has_no_weights_reads_nothing(models: Path, drafter: str | None) -> None:
    assert check_drafter(config(models, drafter))["taps"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "the target's embedding is"),
        ({"target_layer_ids": [0, 7]}, "the target has 3 layers"),
        ({"block_size": 2}, "gamma=3 is outside 1..2"),
    ],
)
def test_what_was_made_for_another_target_is_refused_by_field_and_remedy(
    models: Path, changes: dict[str, Any], message: str
) -> None:
    declare(models, **changes)
    with pytest.raises(CheckpointError, match=message):
        check_drafter(config(models, str(models / "drafter")))
