"""Cost curves are measured once for one model on one machine, and again for anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.core.own_profile import StepTimes
from cluster.profile_cache import cached_step_times
from configs.schema import ClusterConfig
from tests.pure.test_routing import TARGET_SPEC

CONFIG = ClusterConfig()


class Meter:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> StepTimes:
        self.num_calls += 1
        return np.array([1, 8]), np.array([1, 4]), np.array([0.25, 0.5 + self.num_calls])


def test_the_second_start_reads_what_the_first_measured(tmp_path: Path) -> None:
    meter = Meter()
    first = cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path / "new")
    second = cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path / "new")
    assert meter.num_calls == 1
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "changed",
    [
        {"drafter": {"gamma": 3}},
        {"target": {"max_running": 8}},
        {"target": {"max_batch_tokens": 512}},
    ],
)
def test_other_settings_are_measured_again(tmp_path: Path, changed: dict[str, object]) -> None:
    meter = Meter()
    cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_step_times(TARGET_SPEC, ClusterConfig.model_validate(changed), meter, tmp_path)
    assert meter.num_calls == 2


def test_another_model_is_measured_again(tmp_path: Path) -> None:
    meter = Meter()
    cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_step_times(replace(TARGET_SPEC, identity="other"), CONFIG, meter, tmp_path)
    assert meter.num_calls == 2


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[1]", '{"batch_tokens": [], "num_requests": [], "step_time_s": []}',
                '{"batch_tokens": [1], "num_requests": [1, 2], "step_time_s": [0.1]}']
)  # fmt: skip
def test_a_damaged_file_is_measured_again_and_replaced(tmp_path: Path, content: str) -> None:
    meter = Meter()
    cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path)
    cached_step_times(TARGET_SPEC, CONFIG, meter, tmp_path)
    assert meter.num_calls == 2


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    meter = Meter()
    assert cached_step_times(TARGET_SPEC, CONFIG, meter, blocked / "below")[2][0] == 0.25
