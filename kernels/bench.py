"""Time every kernel on the GPU at hand, over its floor and over its torch twin.

python -m kernels.bench            # a table
python -m kernels.bench --json     # the same for other tools

The floor is the larger of the bytes a kernel must move over the copying speed of this GPU, and its products over the
speed of a large bfloat16 product; both are measured first, so the floor is one that this machine reaches. Without a GPU
it says so, and lists the bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from kernels import dispatch
from kernels.bench_cases import Case, cases

COPY_BYTES, PRODUCT_SIZE = 1 << 30, 8192
NEEDS_GPU = (
    "no CUDA device here, so nothing was timed: bytes and products are what each kernel cannot do without. "
    "On a GPU run `python -m kernels.bench --json`."
)
NEEDS_TRITON = "Triton is not installed: pip install 'dspark-cluster[gpu]'"


@dataclass(frozen=True)
class Machine:
    """What this GPU reaches."""

    name: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Timing:
    """One case; times in microseconds, None where nothing was measured."""

    name: str
    num_bytes: int
    num_flops: int
    floor_us: float | None = None
    kernel_us: float | None = None
    twin_us: float | None = None

    @property
    def over_floor(self) -> float | None:
        """How many times its floor the kernel takes."""
        return self.kernel_us / self.floor_us if self.kernel_us and self.floor_us else None

    @property
    def over_twin(self) -> float | None:
        """Share of the twin's time that the kernel takes."""
        return self.kernel_us / self.twin_us if self.kernel_us and self.twin_us else None


def floor_us(case: Case, machine: Machine) -> float:
    """Microseconds below which this machine cannot do it."""
    return 1e6 * max(case.num_bytes / machine.bytes_per_s, case.num_flops / machine.flops_per_s)


def obstacle() -> str | None:
    """Why nothing can be timed here, or None."""
    if not torch.cuda.is_available():
        return NEEDS_GPU
    return None if dispatch.triton_version() else NEEDS_TRITON


def measure(only: str = "") -> dict[str, Any]:
    """Everything `--json` prints."""
    chosen = [case for case in cases() if only in case.name]
    report: dict[str, Any] = {"day": datetime.now(UTC).date().isoformat(), "gpu": None}
    why = obstacle()
    if why is not None:
        timings = [Timing(c.name, c.num_bytes, c.num_flops) for c in chosen]
        return report | {"explanation": why, "kernels": [_entry(t) for t in timings]}
    device = torch.device("cuda")
    machine = _machine(device)
    timings = [_timed(case, machine, device) for case in chosen]
    return report | {"gpu": asdict(machine), "kernels": [_entry(t) for t in timings]}


def _entry(timing: Timing) -> dict[str, Any]:
    ratios = {"over_floor": timing.over_floor, "over_twin": timing.over_twin}
    return asdict(timing) | ratios


def _machine(device: torch.device) -> Machine:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
    return Machine(
        torch.cuda.get_device_name(),
        2 * COPY_BYTES / (_time_us(lambda: target.copy_(source)) * 1e-6),
        2 * PRODUCT_SIZE**3 / (_time_us(lambda: a @ a) * 1e-6),
    )


def _timed(case: Case, machine: Machine, device: torch.device) -> Timing:
    with torch.inference_mode():
        kernel, twin = case.build(device)
        times = [_time_us(run) for run in (kernel, twin)]
    return Timing(case.name, case.num_bytes, case.num_flops, floor_us(case, machine), *times)


def _time_us(run: Callable[[], object]) -> float:
    """Median of many runs, the second-level cache emptied between them."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(run, return_mode="median"))


def table(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [report["explanation"]] if report.get("explanation") else []
    if report["gpu"]:
        gpu = report["gpu"]
        lines.append(
            f"{gpu['name']}, {report['day']}: copies {gpu['bytes_per_s'] / 1e12:.2f} TB/s, "
            f"multiplies {gpu['flops_per_s'] / 1e12:.0f} TFLOP/s"
        )
    lines.append("| kernel | MB | GFLOP | floor us | kernel us | over floor | over twin |")
    lines.append("|---|---|---|---|---|---|---|")
    for entry in report["kernels"]:
        keys = ("floor_us", "kernel_us", "over_floor", "over_twin")
        shown = ["not measured" if entry[k] is None else f"{entry[k]:.2f}" for k in keys]
        sizes = (f"{entry['num_bytes'] / 1e6:.2f}", f"{entry['num_flops'] / 1e9:.2f}")
        lines.append("| " + " | ".join((entry["name"], *sizes, *shown)) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; status 0 also where nothing could be measured, which the report says."""
    parser = argparse.ArgumentParser(description="time the kernels on the GPU at hand")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    options = parser.parse_args(arguments)
    report = measure(options.only)
    sys.stdout.write(json.dumps(report, indent=1) + "\n" if options.json else table(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
