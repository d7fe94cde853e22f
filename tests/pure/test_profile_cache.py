"""Step times are measured once for one model on one machine, and again for anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.core.step_samples import StepSamples
from cluster import profile_cache
from cluster.profile_cache import cached_samples, code_identity, profile_path, read_samples
from configs.schema import ClusterConfig
from tests.pure.test_routing import TARGET_SPEC

CONFIG = ClusterConfig()


class Meter:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> StepSamples:
        self.num_calls += 1
        times = np.array([[0.25, 0.26], [0.5, 0.5 + self.num_calls]])
        one = np.array([1, 8]), np.array([1, 4]), np.array([256, 256])
        return StepSamples(*one, times, 256)


def test_the_second_start_reads_what_the_first_measured(tmp_path: Path) -> None:
    meter = Meter()
    first = cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path / "new")
    second = cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path / "new")
    assert meter.num_calls == 1
    assert np.array_equal(first.times_s, second.times_s)
    assert all(np.array_equal(a, b) for a, b in zip(first.curve(), second.curve(), strict=True))


def test_what_a_group_did_together_is_kept_and_measured_again_when_another_rank_has_nothing(
    tmp_path: Path,
) -> None:
    times = np.array([[0.25, 0.26], [0.5, 0.6]])
    one = np.array([1, 8]), np.array([1, 4]), np.array([256, 256])
    told = StepSamples(*one, times, 256, times / 2)
    asked: list[bool] = []

    def others_have_none(own: bool) -> bool:
        asked.append(own)
        return False

    for _ in range(2):
        cached_samples(TARGET_SPEC, CONFIG, lambda: told, tmp_path, others_have_none)
    assert asked == [False, True]
    kept = read_samples(profile_path(TARGET_SPEC, CONFIG, tmp_path))
    assert kept is not None and kept.shared_s is not None
    assert kept.shared_s.tolist() == (times / 2).tolist()


@pytest.mark.parametrize(
    "changed",
    [
        {"drafter": {"gamma": 3}},
        {"target": {"max_running": 8}},
        {"target": {"max_batch_tokens": 512}},
        {"target": {"kv_cache_tokens": 65536}},
        {"model": {"max_model_len": 512}},
    ],
)
def test_other_settings_are_measured_again(tmp_path: Path, changed: dict[str, object]) -> None:
    meter = Meter()
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_samples(TARGET_SPEC, ClusterConfig.model_validate(changed), meter, tmp_path)
    assert meter.num_calls == 2


def test_another_model_is_measured_again(tmp_path: Path) -> None:
    meter = Meter()
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_samples(replace(TARGET_SPEC, identity="other"), CONFIG, meter, tmp_path)
    assert meter.num_calls == 2


def test_another_build_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, sources = Meter(), tmp_path / "build"
    sources.mkdir()
    (sources / "step.py").write_text("rows = 16")
    monkeypatch.setattr(profile_cache, "code_identity", lambda: code_identity((sources,)))
    for _ in range(2):
        cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path / "kept")
    assert meter.num_calls == 1
    (sources / "step.py").write_text("rows = 32")
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path / "kept")
    assert meter.num_calls == 2


def test_the_identity_of_the_code_covers_the_engine_and_the_kernels() -> None:
    covered = {path.name for folder in profile_cache.SOURCES for path in folder.glob("*.py")}
    assert {
        "target_engine.py",
        "packed_linear.py",
        "ragged_attention.py",
        "attention.py",
    } <= covered


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[1]",
                '{"batch_tokens": [], "num_requests": [], "context_len": [], "times_s": [], "curve_context_len": 1}',
                '{"batch_tokens": [1], "num_requests": [1, 2], "context_len": [1], "times_s": [[1]], '
                '"curve_context_len": 1}']
)  # fmt: skip
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, content: str) -> None:
    meter = Meter()
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert read_samples(file) is None
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_samples(TARGET_SPEC, CONFIG, meter, tmp_path)
    assert meter.num_calls == 2
    assert file == profile_path(TARGET_SPEC, CONFIG, tmp_path)


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    samples = cached_samples(TARGET_SPEC, CONFIG, Meter(), blocked / "below")
    assert samples.times_s[0, 0] == 0.25
