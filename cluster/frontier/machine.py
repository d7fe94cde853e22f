"""What measures, and whether anything else runs beside it."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from cluster.console import CommandError, note
from configs.machine import CPUINFO, cpu_flags

BUSY_SAMPLE_S = 2.0  # before the first cell
LONG_SAMPLE_S = 15.0  # where the load average tells of work that may be over
CELL_SAMPLE_S = 0.3  # before each other
MOST_LOAD = 0.5  # of the cores: above, somebody else is at work
MOST_IDLE_BUSY = 0.35  # of the cores, while our own cluster waits


def facts() -> dict[str, Any]:
    """Of this machine, without its name."""
    model = ""
    try:
        for line in CPUINFO.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            model = model or (value.strip() if name.strip() == "model name" else "")
    except OSError:
        pass  # not Linux: nothing is claimed
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "flags": flag_class(cpu_flags()),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def flag_class(flags: set[str]) -> str:
    """What decides how fast this CPU multiplies."""
    for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2"):
        if name in flags:
            return name
    return "other"


def load(sample_s: float) -> dict[str, float]:
    """Cores' worth of work that runs right now, and the load average of the last minute."""
    cores = os.cpu_count() or 1
    busy = psutil.cpu_percent(interval=sample_s) / 100 * cores
    return {"busy_cores": round(busy, 2), "load_average": round(os.getloadavg()[0], 2)}


def watch(cores: int) -> dict[str, float]:
    """`load` before the first cell: longer where the last minute was busy, perhaps with a measurement of our own."""
    seen = load(BUSY_SAMPLE_S)
    if seen["busy_cores"] <= MOST_LOAD * cores < seen["load_average"]:
        note(
            f"the last minute was busy; looking for {LONG_SAMPLE_S:g} s whether anything still runs"
        )
        seen = load(LONG_SAMPLE_S)
    return seen


def is_disturbed(before: dict[str, float], cores: int) -> bool:
    """Whether more ran before a cell than an idle cluster of ours. The load average would count our own last cell."""
    return before["busy_cores"] > MOST_IDLE_BUSY * cores


def refuse_other_load(seen: dict[str, float], cores: int, *, force: bool) -> str:
    """ "" on a quiet machine; else a warning with `force`, or no measurement at all.

    Raises:
        CommandError: something else runs.
    """
    if seen["busy_cores"] <= MOST_LOAD * cores:
        return ""
    text = (
        f"something else runs on this machine ({seen['busy_cores']:g} of {cores} cores busy, load average "
        f"{seen['load_average']:g})"
    )
    if not force:
        raise CommandError(
            f"{text}: numbers would say nothing. Wait for it, or measure all the same with --force"
        )
    return f"{text}: measured all the same (--force)"
