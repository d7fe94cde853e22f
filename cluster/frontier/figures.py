"""Two pictures: speed per user against throughput of the node, and how far a request is verified as the load grows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patheffects import withStroke

from cluster.frontier.plan import BRACKET, FIXED, LAGGED, MTP1, NONE

DPI = 150
SIZE = (9.5, 6.0)
_OURS = {  # colours that stay apart for colour-blind eyes
    LAGGED: ("#D55E00", "o", 2.4),
    "joint": ("#CC79A7", "s", 1.6),
    "threshold": ("#009E73", "D", 1.4),
    MTP1: ("#0072B2", "^", 2.0),
    NONE: ("#000000", "o", 1.6),
}
_PEER_COLOURS = ("#8B5A2B", "#6A3D9A", "#B15928", "#1B7837")
_HIDDEN = (BRACKET,)  # measured to compare the two clusters, not a contender


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """One pair of pictures for each temperature."""
    written = []
    for temperature, lines in report["frontier"].items():
        shown = {label: points for label, points in lines.items() if label not in _HIDDEN}
        suffix = f"-t{temperature}" if len(report["frontier"]) > 1 else ""
        title = _title(report, temperature)
        for name, paint in (("frontier", _frontier), ("budget", _budget)):
            figure, axes = plt.subplots(figsize=SIZE)
            paint(axes, shown)
            axes.set_title(title, fontsize=9, loc="left")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
            figure.tight_layout()
            path = folder / f"{name}{suffix}.png"
            figure.savefig(path, dpi=DPI)
            plt.close(figure)
            written.append(path)
    return written


def _title(report: Mapping[str, Any], temperature: str) -> str:
    machine, model = report["machine"], report["model"]
    return (
        f"{model['name']}, {model['dtype']}, temperature {temperature}: medians of {report['repeats']} repeats, bars "
        f"smallest to largest\n{machine['cpu']}, {machine['cores']} cores, {report['date'][:10]}"
    )


def _style(label: str, lines: Mapping[str, Any]) -> dict[str, Any]:
    """Fixed lengths are shades of grey, so that the contenders that matter stand out."""
    if label in _OURS:
        colour, marker, width = _OURS[label]
        order = 4 if label == LAGGED else 3
        return {"color": colour, "marker": marker, "lw": width, "zorder": order}
    fixed = [other for other in lines if other.startswith(f"{FIXED}-")]
    if label in fixed:
        shade = 0.75 - 0.4 * fixed.index(label) / max(1, len(fixed) - 1)
        dashes = (0, (1 + fixed.index(label), 1.5))
        return {"color": str(shade), "marker": ".", "lw": 1.2, "zorder": 2, "linestyle": dashes}
    peers = [other for other in lines if other not in _OURS and other not in fixed]
    colour = _PEER_COLOURS[peers.index(label) % len(_PEER_COLOURS)]
    return {"color": colour, "marker": "x", "lw": 1.4, "zorder": 2, "linestyle": "--"}


def _name(label: str) -> str:
    return label.replace(f"{FIXED}-", "fixed γ = ") if label.startswith(f"{FIXED}-") else label


def _points(points: Mapping[str, Any], *names: str) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """(concurrency, the values called so), where all of them were measured."""
    found = [(int(count), [values[name] for name in names]) for count, values in points.items()]
    return sorted((count, values) for count, values in found if None not in values)


def _frontier(axes: Any, lines: Mapping[str, Any]) -> None:
    for label, points in lines.items():
        known = _points(points, "user_tokens_per_s", "node_tokens_per_s")
        if not known:
            continue
        users, nodes = ([values[axis] for _, values in known] for axis in (0, 1))
        axes.errorbar(
            [value["median"] for value in users],
            [value["median"] for value in nodes],
            xerr=_bars(users),
            yerr=_bars(nodes),
            elinewidth=0.8,
            label=_name(label),
            ms=5,
            **_style(label, lines),
        )
        if label in (LAGGED, NONE):
            for count, (user, node) in known:
                axes.annotate(
                    str(count),
                    (user["median"], node["median"]),
                    textcoords="offset points",
                    xytext=(7, 5) if label == LAGGED else (-12, -11),
                    fontsize=8,
                    color=_OURS[label][0],
                    zorder=6,
                    path_effects=[withStroke(linewidth=2.5, foreground="white")],
                )
    axes.set_xlabel("tokens/s of a user (numbers: streams at once)")
    axes.set_ylabel("tokens/s of the node")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _budget(axes: Any, lines: Mapping[str, Any]) -> None:
    counts = set()
    for label, points in lines.items():
        known = _points(points, "scheduled_per_round")
        if not known:
            continue
        values = [of[0] for _, of in known]
        counts |= {count for count, _ in known}
        axes.errorbar(
            [count for count, _ in known],
            [value["median"] for value in values],
            yerr=_bars(values),
            elinewidth=0.8,
            label=_name(label),
            ms=5,
            **_style(label, lines),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(counts), [str(count) for count in sorted(counts)])
    axes.set_xlabel("streams at once")
    axes.set_ylabel("draft tokens verified, a request and round")
    axes.set_ylim(bottom=0)


def _bars(values: list[Mapping[str, Any]]) -> list[list[float]]:
    """Distances from the median to the smallest and to the largest repeat."""
    below = [value["median"] - min(value["repeats"]) for value in values]
    above = [max(value["repeats"]) - value["median"] for value in values]
    return [[max(0.0, one) for one in below], [max(0.0, one) for one in above]]
