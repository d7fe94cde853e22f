"""What the benchmark runs on a GPU runs here, interpreted and small: kernels are found, called right, and agree."""

from __future__ import annotations

import json

import pytest
import torch

from kernels import bench, bench_cases

SMALL = {
    "ROWS": 2, "CONTEXT": 40, "HEADS": 4, "KV_HEADS": 2, "DIM": 16, "BLOCK": 16, "VOCAB": 96,
    "RANK": 16, "GAMMA": 2, "TOP_K": 4, "EXPERTS": 4, "HIDDEN": 32, "INNER": 24, "VISITED": 2,
    "TOKENS": 6,
}  # fmt: skip
NAMES = [case.name for case in bench_cases.cases()]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(bench_cases, name, size)


def flat(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    assert isinstance(result, tuple)
    return [part for part in result if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("name", [n for n in NAMES if "1024" not in n and "rotation" not in n])
def test_kernel_and_twin_of_a_benchmark_agree(name: str) -> None:
    torch.manual_seed(0)
    case = next(case for case in bench_cases.cases() if case.name == name)
    kernel, twin = case.build(torch.device("cpu"))
    for found, wanted in zip(flat(kernel()), flat(twin()), strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        if found.is_floating_point() and found.dim() == 2:
            torch.testing.assert_close(found.float(), wanted.float(), atol=0.1, rtol=0.1)


def test_kernel_benchmark_explains_itself_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] is None and "no CUDA device" in report["explanation"]
    assert [entry["name"] for entry in report["kernels"]] == NAMES
    assert all(entry["num_bytes"] > 0 and entry["kernel_us"] is None for entry in report["kernels"])
    bench.main([])
    assert "not measured" in capsys.readouterr().out


def test_kernel_floor_is_the_dearer_of_bytes_and_products() -> None:
    machine = bench.Machine("a GPU", bytes_per_s=1e12, flops_per_s=1e14)
    case = bench_cases.Case("x", "verify", 2 * 10**6, 10**9, lambda _: (int, int))
    assert bench.floor_us(case, machine) == pytest.approx(10.0)
    timing = bench.Timing("x", 0, 0, floor_us=10.0, kernel_us=15.0, twin_us=60.0)
    assert (timing.over_floor, timing.over_twin) == (1.5, 0.25)
