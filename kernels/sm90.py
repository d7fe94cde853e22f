"""Compile every kernel for Hopper (sm_90) without a GPU, and report registers, spills and shared memory.

python -m kernels.sm90 --json sm90.json --markdown sm90.md

A kernel that spills, or needs more registers than its bound, ends the run with status 1: both show in the launch path
only as lost speed. So does one that computes an address in 32 bits: that shows only in a cache of gigabytes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.narrow_products import narrow_products

REGISTERS_PER_SM = 65536


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched.

    Attributes:
        kernel: the decorated function.
        types: of the arguments that are not compile-time constants, in order ("*bf16", "i32", "fp32").
        constants: the compile-time ones.
        max_registers: bound a thread; 255 is what the machine has.
        wants: instructions that must appear in the PTX ("wgmma").
    """

    name: str
    kernel: Any
    types: str
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int = 168
    wants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What ptxas said of one variant."""

    name: str
    registers: int
    max_registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    missing: tuple[str, ...]
    compile_s: float
    narrow_products: tuple[str, ...] = ()  # see `kernels.narrow_products`

    @property
    def complaint(self) -> str | None:
        """What is wrong with it, or None."""
        if self.spill_bytes:
            return f"{self.name} spills {self.spill_bytes} bytes; smaller tiles or more warps"
        if self.registers > self.max_registers:
            return f"{self.name} needs {self.registers} registers, bound {self.max_registers}"
        if self.missing:
            return f"{self.name} has no {', '.join(self.missing)} in its PTX"
        if self.narrow_products:
            products = ", ".join(self.narrow_products)
            return f"{self.name} multiplies in 32 bits: {products}; cast one to int64, or say in SAFE why not"
        return None


def compile_variant(variant: Variant) -> Compiled:
    """Compile and assemble one variant for sm_90a. Needs Triton and no driver."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    started = time.perf_counter()
    names = [n for n in variant.kernel.arg_names if n not in variant.constants]
    types = variant.types.split()
    assert len(names) == len(types), f"{variant.name}: {names} have types {types}"
    signature = dict.fromkeys(variant.kernel.arg_names, "constexpr") | dict(
        zip(names, types, strict=True)
    )
    # Pointers of whole tensors are 16-byte aligned, as the launch path finds out by itself.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(variant.kernel.arg_names)
        if signature[n].startswith("*")
    }
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    made = compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spills = _assemble(made.asm["ptx"])
    return Compiled(
        variant.name,
        registers,
        variant.max_registers,
        spills,
        made.metadata.shared,
        variant.num_warps,
        tuple(w for w in variant.wants if w not in made.asm["ptx"]),
        round(time.perf_counter() - started, 2),
        tuple(narrow_products(made.asm["ttir"])),
    )


def _assemble(ptx: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, from the ptxas that Triton ships."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert registers, done.stderr
    return max(map(int, registers)), sum(map(int, spills))


def markdown(report: Sequence[Compiled]) -> str:
    """The report as a table."""
    lines = [
        "| kernel | warps | registers | bound | spilled bytes | shared bytes | compile s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.name} | {c.num_warps} | {c.registers} | {c.max_registers} | {c.spill_bytes} | "
        f"{c.shared_bytes} | {c.compile_s} |"
        for c in report
    ]
    return "\n".join(lines) + "\n"


def compile_all(only: str = "") -> list[Compiled]:
    """Compile the catalogue, or the variants whose name contains `only`."""
    from kernels.device.catalogue import variants

    chosen = [v for v in variants() if only in v.name]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_variant, chosen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, write the reports asked for, and say what is wrong on standard error."""
    parser = argparse.ArgumentParser(description="compile the kernels for sm_90 without a GPU")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--markdown", type=Path, help="write it as a table here")
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    options = parser.parse_args(arguments)
    try:
        import triton  # noqa: F401
    except ImportError:
        sys.stderr.write("Triton is not installed: pip install 'dspark-cluster[gpu]'\n")
        return 2
    report = compile_all(options.only)
    if options.json:
        options.json.write_text(json.dumps([asdict(c) for c in report], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(report))
    sys.stdout.write(markdown(report))
    complaints = [c.complaint for c in report if c.complaint]
    sys.stderr.writelines(f"{c}\n" for c in complaints)
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
