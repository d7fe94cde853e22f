"""The report as pictures: the frontier, verified tokens over load, ratios, gains."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from cluster.simulation.experiments import Report

SIZE = (7.0, 4.5)
DPI = 150
# Distinct in print and for colour-blind readers (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
MARKERS = "os^Dvp*x"


def draw(report: Report, folder: Path) -> list[Path]:
    """Every figure the report has data for."""
    scenario = report.scenario
    written = []
    if scenario.kind == "random_configurations":
        written.append(_save(_gains(report), folder / "gains.png"))
        return written
    if scenario.sweep:
        written.append(_save(_frontier(report), folder / "frontier.png"))
        written.append(_save(_budgets(report), folder / "budgets.png"))
        if "over_best_fixed" in report.answers and report.answers["over_best_fixed"]["by_load"]:
            written.append(_save(_over_fixed(report), folder / "over_best_fixed.png"))
    else:
        written.append(_save(_bars(report), folder / "throughput.png"))
        written.append(_save(_by_rank(report), folder / "budget_by_rank.png"))
    return written


def _figure(report: Report, x: str, y: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=SIZE)
    axes.set_title("\n".join(textwrap.wrap(report.scenario.title, 80)), fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def _styles(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, system in enumerate(report.scenario.systems):
        adaptive = system.policy in ("joint", "lagged", "algorithm1")
        yield (
            system.name,
            {
                "color": COLOURS[at % len(COLOURS)],
                "marker": MARKERS[at % len(MARKERS)],
                "markersize": 4.5,
                "linewidth": 2.0 if adaptive else 1.0,
                "linestyle": "-" if adaptive else "--",
                "label": system.name,
            },
        )


def _frontier(report: Report) -> Any:
    figure, axes = _figure(report, "tokens/s a user", "tokens/s a rank")
    for name, style in _styles(report):
        points = [p.result for p in report.of(name)]
        axes.plot([p.tps for p in points], [p.throughput_per_rank for p in points], **style)
    published = report.scenario.published
    if published is not None:
        axes.axvline(published.sla_tps, color="#999999", linewidth=0.8)
        axes.scatter([], [], s=70, facecolors="none", edgecolors="#666666", label="published")
        for name, style in _styles(report):
            rates = [
                (values[name] / load, values[name])
                for load, values in published.throughput_by_concurrency.items()
                if name in values
            ]
            if rates:
                x, y = zip(*rates, strict=True)
                axes.scatter(x, y, s=70, facecolors="none", edgecolors=style["color"])
    axes.legend(frameon=False, fontsize=8)
    return figure


def _budgets(report: Report) -> Any:
    figure, axes = _figure(report, "requests a rank", "verified tokens a request (anchor included)")
    for name, style in _styles(report):
        points = [p.result for p in report.of(name)]
        axes.plot(
            [p.concurrency_per_rank for p in points],
            [p.budget_per_request for p in points],
            **style,
        )
    published = report.scenario.published
    if published is not None:
        budget = published.budget_by_concurrency
        axes.scatter(
            list(budget),
            list(budget.values()),
            s=70,
            facecolors="none",
            edgecolors=COLOURS[0],
            label="published",
            zorder=3,
        )
    elif max(report.scenario.sweep) > 32 * min(report.scenario.sweep):
        axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _over_fixed(report: Report) -> Any:
    figure, axes = _figure(report, "requests a rank", "throughput over the best fixed length")
    styles = dict(_styles(report))
    for name, by_load in report.answers["over_best_fixed"]["by_load"].items():
        loads = [float(load.removesuffix("/s")) for load in by_load]
        axes.plot(loads, list(by_load.values()), **styles[name])
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _bars(report: Report) -> Any:
    figure, axes = _figure(report, "", "tokens/s a rank")
    rates = {p.result.system: p.result.throughput_per_rank for p in report.points}
    bars = axes.bar(list(rates), list(rates.values()), color=COLOURS[: len(rates)])
    axes.bar_label(bars, fmt="%.0f", fontsize=8)
    return figure


def _by_rank(report: Report) -> Any:
    figure, axes = _figure(report, "rank", "verified tokens a request (anchor included)")
    for name, style in _styles(report):
        budgets = report.of(name)[0].result.budget_by_rank
        axes.plot(range(len(budgets)), budgets, **style)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _gains(report: Report) -> Any:
    ours, base = report.answers["compared"]
    figure, axes = _figure(report, "configuration, by gain", f"gain of {ours} over {base} (%)")
    gains = sorted(100 * gain for gain in report.answers["gains"])
    axes.bar(range(len(gains)), gains, color=[COLOURS[0] if g >= 0 else COLOURS[1] for g in gains])
    axes.axhline(-0.5, color="#999999", linewidth=0.8, linestyle="--")
    return figure
