"""The curves of a run, drawn from its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def plot_log(log: Path, png: Path) -> None:
    """Draw the loss and the agreement of slots 1, 3 and last against steps, smoothed over 50, and what was held out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if not entries:
        return
    steps = [e["step"] for e in entries]
    window = np.ones(min(50, len(entries))) / min(50, len(entries))

    def smooth(values: list[float]) -> Any:
        return np.convolve(values, window, "valid")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), dpi=90)
    at = steps[len(window) - 1 :]
    for name in ("ce", "tv", "confidence"):
        left.plot(at, smooth([e[name] for e in entries]), label=name)
    last = min(len(e["agree"]) for e in entries) - 1  # a run may change its block size
    for slot in dict.fromkeys((0, last // 2, last)):
        right.plot(
            at, smooth([e["agree"][slot] for e in entries]), label=f"agreement, slot {slot + 1}"
        )
    _plot_held_out([e for e in entries if e.get("held_out")], right)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(png)
    pyplot.close(figure)


def _plot_held_out(entries: list[dict[str, Any]], axis: Any) -> None:
    """Mark held-out acceptance length, on an axis of its own, where a run measured it."""
    if not entries:
        return
    other = axis.twinx()
    lengths = [e["held_out"]["acceptance_length"] for e in entries]
    other.plot([e["step"] for e in entries], lengths, "k.-", label="held out: tokens a round")
    other.set_ylabel("tokens a round, held out")
    other.legend(loc="lower right")
