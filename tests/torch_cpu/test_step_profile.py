"""Measuring steps: which points, in which order, and within which bounds. Times themselves are the machine's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.step_samples import StepSamples
from actors.engine import step_profile
from actors.engine.expert_group import ExpertGroup
from actors.engine.target_engine import load_engine
from cluster import profile_cache
from cluster.cli import main
from configs.schema import ClusterConfig
from tests.cluster import tiny_mixture
from tests.torch_cpu.thread_ranks import ThreadCollective, on_ranks


@pytest.fixture
def config(oracle_models: Path) -> ClusterConfig:
    torch.set_num_threads(1)
    return ClusterConfig.model_validate(
        {
            "model": {"path": str(oracle_models / "llama"), "max_model_len": 256},
            "target": {"kv_cache_tokens": 1024, "max_running": 6, "max_batch_tokens": 24},
        }
    )


def test_the_curve_covers_what_a_rank_can_be_asked_for(config: ClusterConfig) -> None:
    samples = step_profile.quick_samples(load_engine(config), config)
    tokens, requests, seconds, shared = samples.curve()
    assert shared is None, "it is in no group"
    assert len(tokens) == len(requests) == len(seconds) == len(step_profile.curve_points(config))
    assert (tokens[:-1] <= tokens[1:]).all() and (seconds > 0).all()
    assert tokens.min() == 1 and tokens.max() <= 24
    assert set(requests.tolist()) == {1, 2, 4, 6}
    assert ((tokens % requests) == 0).all()
    assert not samples.has_contexts and samples.times_s.shape[1] == step_profile.QUICK_REPEATS


def test_a_machine_too_slow_for_the_whole_curve_gets_its_corners(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_profile, "QUICK_BUDGET_S", 0.0)
    tokens, *_ = step_profile.quick_samples(load_engine(config), config).curve()
    assert len(tokens) == step_profile.MIN_POINTS
    assert "measured in" in caplog.text
    corners = [(1, 1), (1, 6), (6, 1)]  # (6, 6) is more than a step of this rank may hold
    points = step_profile.curve_points(config)[:3]
    assert [(point.num_requests, point.query_len) for point in points] == corners
    assert {1, 6} <= set(tokens.tolist())


def test_the_whole_grid_has_other_contexts_and_is_walked_round_and_round(
    config: ClusterConfig,
) -> None:
    num_steps = 0

    def advance() -> None:
        nonlocal num_steps
        num_steps += 1

    samples = step_profile.full_samples(load_engine(config), config, 2, advance)
    assert num_steps == step_profile.num_measurements(config, 2)
    # All six rows must fit into the cache of 1,024 tokens, each with a block behind its context.
    assert set(samples.context_len.tolist()) == {32, 1024 // 6 - 6}
    assert samples.curve_context_len == 1024 // 6 - 6
    others = samples.context_len == 32
    assert set((samples.batch_tokens // samples.num_requests)[others].tolist()) == {1, 6}
    assert samples.times_s.shape == (len(samples.context_len), 2)
    assert (samples.times_s > 0).all()


def test_every_step_has_the_context_and_the_tokens_of_its_point(config: ClusterConfig) -> None:
    points = step_profile.full_points(config)
    steps = step_profile._Steps(load_engine(config), config, points)
    for point in points:
        plan = steps._plans[point]
        assert plan.num_requests == point.num_requests
        assert plan.batch_tokens == point.batch_tokens
        assert set(plan.context_len.tolist()) == {point.context_len}
        assert np.all(plan.verify_len == point.query_len - 1)


def test_the_command_measures_keeps_and_tells(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "cluster.profile.profile_path", lambda spec, _: tmp_path / f"{spec.identity}.json"
    )
    command = ["profile", "--state", str(tmp_path / "none"), "--repeats", "2", "--json"]
    for setting in ("max_model_len=256", f"path={config.model.path}", "drafter=null"):
        command += ["--set", f"model.{setting}"]
    for setting in (
        "kv_cache_tokens=1024",
        "max_running=6",
        "max_batch_tokens=24",
        "num_threads=1",
    ):
        command += ["--set", f"target.{setting}"]
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")  # the command sets them; put back afterwards
    monkeypatch.setattr("actors.core.own_profile.FLAT_RATIO", 0.0)
    monkeypatch.setattr("actors.core.sps.FLAT_RATIO", 0.0)  # a model this small may well be flat
    assert main([*command, "--set", "model.dtype=float32"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_threads"] == 1 and report["dtype"] == "float32"
    kept = profile_cache.read_samples(tmp_path / f"{report['identity']}.json")
    assert kept is not None and kept.has_contexts
    assert len(kept.context_len) == len(report["points"])


SLEEP_S = 0.01


def test_ranks_of_a_group_measure_at_once_and_each_tells_its_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is slow in attention: that is its own time, and for the other one waiting."""
    monkeypatch.setattr(step_profile, "QUICK_BUDGET_S", 0.0)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(tiny_mixture.write(tmp_path / "model")), "max_model_len": 64},
            "target": {
                "num_ranks": 2, "group_size": 2, "kv_cache_tokens": 256, "max_running": 2,
                "max_batch_tokens": 24,
            },
        }
    )  # fmt: skip

    def measured(collective: ThreadCollective) -> StepSamples:
        group = ExpertGroup(collective.rank, collective.size)
        engine = load_engine(config, group=group)
        mix = engine.model.mix

        def slow_mix(*arguments: Any) -> torch.Tensor:
            time.sleep(SLEEP_S)
            return mix(*arguments)

        if collective.rank:
            engine.model.mix = slow_mix  # type: ignore[method-assign]
        group.attach(collective)
        return step_profile.quick_samples(engine, config)

    (quick, slow), _ = on_ranks(2, measured)
    assert quick.shared_s is not None and slow.shared_s is not None
    assert quick.batch_tokens.tolist() == slow.batch_tokens.tolist()
    slept_s = tiny_mixture.LAYERS * SLEEP_S
    assert (slow.times_s - slow.shared_s > slept_s).all()
    assert (quick.times_s > slept_s).all(), "it waited for the other"
    assert quick.curve().shared_time_s is not None
