"""`dspark profile`: what it refuses, what it keeps, what it shows. The measuring itself is scripted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core.step_samples import StepSamples
from cluster import profile as command
from cluster.cli import main
from cluster.profile_cache import read_samples
from cluster.run_state import RunState, register
from configs.schema import ClusterConfig
from tests.pure.test_routing import TARGET_SPEC


def stairs(tread: float = 0.004) -> StepSamples:
    """Two contexts; a step costs 10 ms and one tread for every 8 tokens."""
    grid = [(r, q, c) for c in (64, 32) for r in (1, 4, 8) for q in (1, 2, 4)]
    tokens = np.array([r * q for r, q, _ in grid])
    context = np.array([c for _, _, c in grid])
    median = 0.010 + tread * -(-tokens // 8) + 1e-6 * context
    times = median[:, None] * np.array([0.98, 1.0, 1.02])
    return StepSamples(tokens, np.array([r for r, _, _ in grid]), context, times, 64)


class Machine:
    """Stands for the engine and its measuring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = stairs()
        self.asked: list[argparse.Namespace] = []
        self.config = ClusterConfig()

    def measure(
        self, config: ClusterConfig, num_threads: int, arguments: argparse.Namespace
    ) -> tuple[Any, StepSamples, Path, bool]:
        self.asked.append(arguments)
        self.config = config
        kept = None if arguments.refresh else read_samples(self.path)
        return TARGET_SPEC, kept or self.samples, self.path, kept is None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "profiles" / "id.json")
    monkeypatch.setattr(command, "_samples", machine.measure)
    return machine


def run(tmp_path: Path, *more: str) -> int:
    return main(["profile", "--state", str(tmp_path / "running.json"), *more])


def test_beside_a_running_cluster_nothing_is_measured(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = RunState(77, "ready", "http://127.0.0.1:8000/v1", "m", "fast", 0.0)
    with register(tmp_path / "running.json", state):
        assert run(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "`dspark stop` first" in said and "127.0.0.1:8000" in said
    assert not machine.asked


def test_a_measurement_is_kept_shown_as_a_table_and_drawn(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--repeats", "3") == 0
    shown = capsys.readouterr()
    header, *rows = [line.split() for line in shown.out.splitlines()[1:20]]
    assert header == ["tokens", "requests", "context", "ms", "from", "to", "tokens/s"]
    assert rows[9] == ["1", "1", "64", "14.06", "13.78", "14.35", "71"]
    assert "spread by ±1.0%" in shown.out and "noisy" not in shown.out
    kept = read_samples(machine.path)
    assert kept is not None and np.array_equal(kept.times_s, machine.samples.times_s)
    picture = machine.path.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in shown.err


def test_what_is_known_is_shown_again_and_refresh_measures_again(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--json", "--out", str(tmp_path / "plots")]
    assert run(tmp_path, *out) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    machine.samples = stairs(0.008)
    assert run(tmp_path, *out) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["points"] == first["points"]
    assert run(tmp_path, *out, "--refresh") == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["points"][-1]["median_s"] > first["points"][-1]["median_s"]
    assert first["identity"] == TARGET_SPEC.identity and len(first["points"]) == 18
    assert len(first["points"][0]["times_s"]) == 3
    assert first["context_cost_s"] > 0
    assert [Path(file).parent for file in again["files"]] == [tmp_path / "plots"]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_flat_curve_is_refused_and_not_kept(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_known: bool
) -> None:
    machine.samples = stairs(tread=1e-6)
    if is_known:
        command.keep_samples(machine.path, machine.samples)
    assert run(tmp_path, "--json") == 1
    shown = capsys.readouterr()
    assert "nothing is kept: the measured cost curve is flat" in shown.err
    assert "error" in json.loads(shown.out.splitlines()[-1])
    assert not machine.path.exists()


def test_noise_and_neighbours_are_remarked_upon(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = stairs()
    machine.samples = StepSamples(
        noisy.batch_tokens, noisy.num_requests, noisy.context_len,
        noisy.median_s[:, None] * np.array([0.5, 1.0, 1.5]), 64,
    )  # fmt: skip
    assert run(tmp_path, "--set", "target.num_ranks=2") == 0
    said = capsys.readouterr().out
    assert "that is noisy" in said and "2 ranks on one machine" in said


def test_no_repeats_are_refused(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--repeats", "0") == 2
    assert "at least 1" in capsys.readouterr().err and not machine.asked
