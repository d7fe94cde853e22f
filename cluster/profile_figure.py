"""The measured cost curve as a picture: every repeat a point, the curve that budgets are searched on a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from actors.core.sps import CostCurve
from actors.core.step_samples import StepSamples

SIZE = (11.0, 4.5)
DPI = 150


def draw(samples: StepSamples, curve: CostCurve, title: str, path: Path) -> None:
    """Left: a step over its tokens. Right: what context adds to it."""
    figure, (over_tokens, over_context) = plt.subplots(1, 2, figsize=SIZE, width_ratios=(3, 2))
    figure.suptitle(title, fontsize=10)
    _tokens(over_tokens, samples, curve)
    _context(over_context, samples)
    for axes in (over_tokens, over_context):
        axes.set_ylabel("ms a step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _tokens(axes: Any, samples: StepSamples, curve: CostCurve) -> None:
    here = samples.context_len == samples.curve_context_len
    requests = np.unique(samples.num_requests[here])
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(requests)))
    for count, colour in zip(requests, colours, strict=True):
        rows = here & (samples.num_requests == count)
        repeats = samples.times_s.shape[1]
        tokens = np.repeat(samples.batch_tokens[rows], repeats)
        times_ms = samples.times_s[rows].ravel() * 1e3
        label = f"{count} requests" if count > 1 else "1 request"
        axes.plot(tokens, times_ms, "o", ms=3, alpha=0.6, color=colour, label=label)
    axes.plot(curve.batch_tokens, curve.step_time_s * 1e3, "-", color="black", lw=1, label="curve")
    axes.set_xlabel(f"tokens of the step (context {samples.curve_context_len})")


def _context(axes: Any, samples: StepSamples) -> None:
    kinds = np.unique(np.stack([samples.num_requests, samples.batch_tokens]), axis=1).T
    for count, tokens in kinds.tolist():
        rows = (samples.num_requests == count) & (samples.batch_tokens == tokens)
        if rows.sum() < 2:
            continue
        order = np.argsort(samples.context_len[rows])
        axes.plot(
            samples.context_len[rows][order],
            samples.median_s[rows][order] * 1e3,
            "o-",
            ms=3,
            lw=1,
            label=f"{count} × {tokens // count} tokens",
        )
    axes.set_xlabel("tokens of context of every request")
