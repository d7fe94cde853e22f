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


COMPILE_MUTANT = """
import importlib.util, sys
from dataclasses import replace
from kernels.device import catalogue
from kernels.sm90 import compile_variant

spec = importlib.util.spec_from_file_location("mutant", sys.argv[1])
mutant = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutant)
variant = next(v for v in catalogue.variants() if v.kernel.fn.__name__ == sys.argv[2])
made = compile_variant(replace(variant, kernel=getattr(mutant, sys.argv[2])))
sys.stdout.write("\\n".join(made.narrow_products))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "old", "new", "product"),
    [
        (
            "attention.attend_kernel",
            "block.to(tl.int64) * BLOCK_SIZE",
            "block * BLOCK_SIZE",
            "load * 16",
        ),
        (
            "rope_store.rope_store_kernel",
            "(head - HEADS).to(tl.int64) * num_slots",
            "(head - HEADS) * num_slots",
            "(program_id_y-32) * num_slots",
        ),
        (
            "experts.gather_kernel",
            "copy = tl.program_id(0).to(tl.int64)",
            "copy = tl.program_id(0)",
            "program_id_x * width",
        ),
    ],
)
def test_sm_90_kernel_that_computes_an_address_in_32_bits_is_found(
    tmp_path: Path, kernel: str, old: str, new: str, product: str
) -> None:
    module, name = kernel.split(".")
    source = (ROOT / "kernels" / "device" / f"{module}.py").read_text()
    assert source.count(old) == 1
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE_MUTANT, str(path), name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert product in done.stdout.splitlines()


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
        ({"narrow_products": ("load * 4096",)}, "multiplies in 32 bits: load * 4096"),
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
