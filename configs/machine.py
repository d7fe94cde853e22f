"""What this machine can do, as far as a default depends on it."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# What oneDNN asks for before it multiplies bfloat16; elsewhere PyTorch falls back to loops several times slower.
BFLOAT16_FLAGS = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"})


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether bfloat16 is the faster format on this CPU; False where the flags cannot be read."""
    flags = cpu_flags()
    return any(needed <= flags for needed in BFLOAT16_FLAGS)


@functools.cache
def has_tile_products() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles (AMX), where oneDNN sums few rows otherwise than many."""
    return "amx_bf16" in cpu_flags()


def cpu_flags() -> set[str]:
    """What this CPU can do, in the kernel's words; empty where they cannot be read."""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())
