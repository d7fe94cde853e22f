"""Every kernel compiles for Hopper without a GPU: no spills, registers within bounds, tensor cores where wanted."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.device
from kernels.device.catalogue import variants
from kernels.sm90 import Compiled

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "build" / "sm_90.json"


@pytest.fixture(scope="module")
def report() -> list[Compiled]:
    """Compiled by a process of its own, since this one interprets; left in build/ for whoever collects artifacts."""
    REPORT.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kernels.sm90", "--json", str(REPORT)]
    command += ["--markdown", str(REPORT.with_suffix(".md"))]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return [Compiled(**entry) for entry in json.loads(REPORT.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sm_90_code_neither_spills_nor_exceeds_its_registers(report: list[Compiled]) -> None:
    complaints = [c.complaint for c in report if c.complaint]
    assert not complaints, "\n".join(complaints)
    assert {c.name for c in report} == {v.name for v in variants()}
    # 228 kB an SM, 227 kB a block.
    assert all(c.shared_bytes <= 227 * 1024 for c in report)


def test_sm_90_report_covers_every_kernel() -> None:
    compiled = {variant.kernel.fn.__name__ for variant in variants()}
    written = set()
    for module in pkgutil.iter_modules(kernels.device.__path__):
        loaded = importlib.import_module(f"kernels.device.{module.name}")
        written |= {name for name in vars(loaded) if name.endswith("_kernel")}
    assert written == compiled


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"registers": 200}, "needs 200 registers, bound 168"),
        ({"missing": ("wgmma",)}, "no wgmma"),
    ],
)
def test_sm_90_report_complains(change: dict[str, object], words: str) -> None:
    good = {
        "name": "k", "registers": 90, "max_registers": 168, "spill_bytes": 0, "shared_bytes": 0,
        "num_warps": 4, "missing": (), "compile_s": 0.1,
    }  # fmt: skip
    assert Compiled(**good).complaint is None  # type: ignore[arg-type]
    complaint = Compiled(**(good | change)).complaint  # type: ignore[arg-type]
    assert complaint is not None and words in complaint
