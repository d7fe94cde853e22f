"""What `model.drafter` names becomes an engine, a target with the right taps, and measured draft times."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.drafter import measure_draft_times
from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.drafters.ngram import NgramEngine
from actors.engine.drafters.pair_engine import PairEngine
from actors.engine.weights import CheckpointError
from actors.link import Membership
from actors.peers import Seat
from cluster.parts import drafter_engine, target_engine
from configs.schema import ClusterConfig
from tests.torch_cpu.rank_engines import write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model

NAMES = list(every_config())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    (path / "target").mkdir()
    write_tiny_llama(path / "target")
    for name, config in every_config(block_size=3).items():
        save_drafter(random_model(config), path / name)
    return path


def config(models: Path, drafter: str | None, gamma: int = 3) -> ClusterConfig:
    model = {"path": str(models / "target"), "drafter": drafter, "dtype": "float32"}
    target = {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64}
    return ClusterConfig.model_validate(
        {
            "model": {**model, "max_model_len": 128},
            "target": target,
            "drafter": {"gamma": gamma},
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_of_any_kind_is_served(models: Path, name: str) -> None:
    gamma = 1 if name == "mtp" else 3
    settings = config(models, str(models / name), gamma)
    seat = Seat("drafter-0", Membership.create())
    engine = drafter_engine(settings, seat)
    target = target_engine(settings, seat)
    assert engine.spec.tap_layer_ids == target.spec.tap_layer_ids
    assert engine.spec.feature_dim == target.spec.feature_dim
    assert (engine.spec.name, engine.spec.gamma) == ("drafter-0", gamma)
    assert isinstance(engine, PairEngine) == (name in ("eagle3", "mtp"))
    times = measure_draft_times(engine, settings)
    assert [size for size, _ in times] == [1, 4, 16]
    assert engine.open_requests() == ()


def test_prompt_lookup_needs_neither_a_directory_nor_taps(models: Path) -> None:
    settings = config(models, "ngram", gamma=6)
    seat = Seat("drafter-0", Membership.create())
    engine = drafter_engine(settings, seat)
    assert isinstance(engine, NgramEngine)
    assert engine.spec.gamma == 6
    assert target_engine(settings, seat).spec.tap_layer_ids == ()
    assert len(measure_draft_times(engine, settings)) == 3


def test_a_drafter_that_is_not_there_is_named(models: Path) -> None:
    seat = Seat("drafter-0", Membership.create())
    missing = config(models, str(models / "nowhere"))
    for build in (drafter_engine, target_engine):
        with pytest.raises(CheckpointError, match="nowhere"):
            build(missing, seat)
    assert target_engine(config(models, None), seat).spec.tap_layer_ids == ()
