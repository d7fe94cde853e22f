"""Measuring: shapes and bounds. Times themselves are the machine's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.core.own_profile import StepTimes
from actors.engine import bench, bench_command, breakdown, round_bench, step_profile, target_engine
from actors.engine.target_engine import load_engine
from configs.load import ConfigError
from configs.schema import ClusterConfig
from tests.torch_cpu.rank_engines import TAPS, real_drafter, write_tiny_llama
from tests.torch_cpu.tiny_target import tiny_engine


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
        assert set(parts) == {
            "linears", "head", "attention", "norms", "step", "step_gathered", "other"
        }  # fmt: skip
    assert len(lines) == 5 and "linears" in lines[-1]


@pytest.mark.parametrize("context", [0, 221])
def test_a_context_without_room_for_the_steps_is_refused(
    config: ClusterConfig, context: int
) -> None:
    with pytest.raises(ConfigError, match=f"--context = {context} .*use 1 to 220"):
        bench.run(config, (1,), print, context=context)


class CountingTimer:
    """A device whose every run takes 2 ms."""

    def __init__(self) -> None:
        self.num_runs = 0

    def ms(self, action: Callable[[], object]) -> float:
        self.num_runs += 1
        action()
        return 2.0


@pytest.mark.parametrize("is_paged", [True, False])
def test_the_breakdown_takes_parts_from_the_devices_timer(
    is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the paged kernels (their twins here), and time as events in a stream say."""
    kind = "triton" if is_paged else "reference"
    fake = SimpleNamespace(implementation=lambda op, device: kind)
    monkeypatch.setattr(target_engine, "dispatch", fake)
    monkeypatch.setattr(target_engine, "CudaGraphRecorder", lambda: None)
    engine, timer = tiny_engine("cpu"), CountingTimer()
    assert (engine.paged is not None) is is_paged
    found = breakdown.breakdown_ms(engine, 3, 20, timer)
    assert [found[part] for part in ("linears", "head", "attention", "norms")] == [2.0] * 4
    assert timer.num_runs == 4 * (breakdown.REPEATS + breakdown.WARM_UPS)
    assert ("step_gathered" in found) is not is_paged
    assert found["step"] > 0 and found["other"] == pytest.approx(max(0, found["step"] - 8), abs=0.1)


def test_each_device_has_the_timer_that_fits_it() -> None:
    assert isinstance(breakdown.timer_for(torch.device("cpu")), breakdown.HostTimer)
    assert isinstance(breakdown.timer_for(torch.device("cuda")), breakdown.CudaTimer)


def test_events_time_a_part_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = "begin" if not log and not hasattr(Event, "made") else "end"
            Event.made = True  # type: ignore[attr-defined]

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert (self.name, end.name) == ("begin", "end")
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert breakdown.CudaTimer().ms(lambda: log.append("work")) == 1.5
    assert log == ["begin", "work", "end", "wait"]


@pytest.mark.parametrize("policy", bench_command.POLICIES)
def test_rounds_are_measured_under_every_policy(tmp_path: Path, policy: str) -> None:
    write_tiny_llama(tmp_path)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(tmp_path), "max_model_len": 128, "dtype": "float32"},
            "target": {"kv_cache_tokens": 2048, "max_running": 3, "max_batch_tokens": 32},
            "drafter": {"gamma": 3},
        }
    )
    target = load_engine(config, tap_layer_ids=TAPS)
    times = StepTimes(np.array([1, 4, 12]), np.array([1, 1, 3]), np.array([0.001, 0.0011, 0.0014]))
    prompts = [np.arange(3, 20), np.array([5])]
    made = round_bench.Bench(config, target, real_drafter(3), times, prompts)
    found = made.measure(policy, 3, new_tokens=12)  # type: ignore[arg-type]
    assert 1.0 <= found["tokens_a_round"] <= 4.0
    assert found["tokens_per_s"] > 0 and found["step_ms"] > 0
    assert (found["verified_a_round"] > 0) is (policy != "none")
    assert not made.replays


def test_the_command_names_what_can_be_combined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_command.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in (
        "1 16 64 256",
        "--policy none lagged --graphs on off",
        "reproducible fast",
        "--breakdown",
    ):
        assert word in said


def test_the_command_measures_every_combination(
    oracle_models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "QUICK_BUDGET_S", 0.0)
    path = str(oracle_models / "llama")
    settings = ["model.max_model_len=256", "target.kv_cache_tokens=1024", "model.drafter=null"]
    given = [part for setting in (f"model.path={path}", *settings) for part in ("--set", setting)]
    chosen = ["--batch", "1", "2", "--policy", "none", "--numerics", "reproducible", "fast"]
    assert bench_command.main([*given, *chosen, "--new-tokens", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = [(row["batch"], row["numerics"], row["graphs"]) for row in report["figures"]]
    assert found == [(b, n, False) for n in ("reproducible", "fast") for b in (1, 2)]
    assert bench_command.main(["--set", "model.path=/nowhere", "--batch", "1"]) == 2


def test_a_step_with_experts_is_reported_by_stage(oracle_models: Path) -> None:
    torch.set_num_threads(1)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(oracle_models / "mixtral"), "max_model_len": 256},
            "target": {"kv_cache_tokens": 1024, "max_running": 6, "max_batch_tokens": 24},
        }
    )
    report = json.loads(json.dumps(bench.run(config, (1, 3), lambda _line: None)))
    stages = {"attention", "dispatch", "experts", "combine", "sampling", "other"}
    assert set(report["step_ms"]) == stages | {"1", "3"} and report["stages_batch"] == 3
    assert set(report["tokens_per_s"]) == {"1", "3"}
    assert all(report["step_ms"][stage] > 0 for stage in stages)


def test_measuring_stages_leaves_experts_as_they_were(oracle_models: Path) -> None:
    from actors.engine.moe_bench import moe_stages_ms
    from tests.torch_cpu.oracle_models import engine_of

    engine = engine_of(oracle_models / "mixtral", max_model_len=256)
    before = [layer.mlp.trace for layer in engine.model.layers]  # type: ignore[union-attr]
    moe_stages_ms(engine, 2)
    assert [layer.mlp.trace for layer in engine.model.layers] == before  # type: ignore[union-attr]


def test_stages_of_a_step_with_experts_add_up_to_the_step_of_median_length(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.engine import moe_bench
    from tests.torch_cpu.oracle_models import engine_of

    ticks, totals = np.random.default_rng(3).random(10_000).cumsum(), []
    step, clock = moe_bench._step, SimpleNamespace(perf_counter=iter(ticks.tolist()).__next__)

    def watched(*arguments: object) -> None:
        step(*arguments)  # type: ignore[arg-type]
        totals.append(sum(arguments[-1].seconds.values()) * 1e3)  # type: ignore[attr-defined]

    monkeypatch.setattr(moe_bench, "time", clock)
    monkeypatch.setattr(moe_bench, "_step", watched)
    engine = engine_of(oracle_models / "mixtral", max_model_len=256)
    found = moe_bench.moe_stages_ms(engine, 2)
    served = sorted(totals[moe_bench.WARM_UP_STEPS :])
    assert len(served) == moe_bench.MEASURED_STEPS
    assert sum(found.values()) == pytest.approx(served[len(served) // 2], abs=0.01)
