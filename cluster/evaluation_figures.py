"""Plots of `dspark evaluate` and `dspark calibrate`, after the paper's Figures 2 to 6. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#e39c1b", "#6b4e9b", "#5c5c5c", "#17a2a2", "#a8561b")
PANEL = (4.4, 3.4)
DPI = 110
FEWEST_ROUNDS = 40  # that reach a position: with fewer, its acceptance is off by more than 0.15
Axes = Any
Report = Mapping[str, Any]


def draw_evaluation(report: Report, out: Path) -> list[Path]:
    """Draw what `dspark evaluate` found into PNG files in `out`; return them."""
    at = f"temperature_{report['temperature']:g}"
    entries = {name: entry[at] for name, entry in report["drafters"].items()}
    heads = [n for n, e in report["drafters"].items() if e["confidence"] == "head"]
    title = f"{report['model']}, temperature {report['temperature']:g}"
    made = [
        _positions(entries, title, out / "positions.png"),
        _domains(entries, title, out / "acceptance.png"),
    ]
    if heads:
        made.append(_thresholds(entries[heads[0]], f"{heads[0]}: {title}", out / "thresholds.png"))
        made.append(
            _reliability(entries[heads[0]], f"{heads[0]}: {title}", out / "reliability.png")
        )
    timed = {n: e["latency"] for n, e in report["drafters"].items() if "latency" in e}
    if timed:
        made.append(_latency(timed, report["model"], out / "latency.png"))
    return made


def draw_calibration(report: Report, out: Path) -> list[Path]:
    """Draw the reliability of each calibrated rule into PNG files in `out`; return them."""
    return [
        _reliability(
            entry,
            f"{rule}, temperature {entry['temperature']:g}",
            out / f"reliability-{rule}.png",
        )
        for rule, entry in report["tables"].items()
    ]


def _panels(count: int, title: str, *, share_y: bool = False) -> tuple[Any, list[Axes]]:
    figure, axes = pyplot.subplots(
        1, count, figsize=(PANEL[0] * count, PANEL[1]), dpi=DPI, squeeze=False, sharey=share_y
    )
    figure.suptitle(title, fontsize=11)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _write(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def _positions(entries: Report, title: str, path: Path) -> Path:
    """Figure 2: acceptance by position, as a prefix and given the ones before; pale where too few rounds got there."""
    figure, axes = _panels(2, title)
    for colour, (name, entry) in zip(COLOURS * 3, entries.items(), strict=False):
        at = range(1, len(entry["survival"]) + 1)
        for axis, key in zip(axes, ("conditional", "survival"), strict=True):
            seen = _seen(entry) if key == "conditional" else len(entry[key])
            axis.plot(at, entry[key], color=colour, linewidth=0.8, alpha=0.35)
            style = {"marker": "o", "markersize": 4, "color": colour, "label": name}
            axis.plot(at[:seen], entry[key][:seen], **style)
    most = max(len(entry["survival"]) for entry in entries.values())
    for axis, text in zip(
        axes, ("accepted, given the ones before", "prefix accepted"), strict=True
    ):
        axis.set_xlabel("position in the block")
        axis.set_ylabel(text)
        axis.set_ylim(0, 1)
        axis.set_xlim(0.7, most + 0.3)
        axis.set_xticks(range(1, most + 1))
    axes[1].legend(fontsize=8)
    return _write(figure, path)


def _seen(entry: Report) -> int:
    """How many positions were reached by enough rounds to say how often they are accepted."""
    reached = [entry["rounds"] * share for share in (1.0, *entry["survival"][:-1])]
    return sum(rounds >= FEWEST_ROUNDS for rounds in reached)


def _domains(entries: Report, title: str, path: Path) -> Path:
    """Table 1 as bars: acceptance length by domain, and the macro mean."""
    domains = [*sorted({d for e in entries.values() for d in e["by_domain"]}), "macro"]
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.5 * len(domains), PANEL[1]), dpi=DPI)
    width = 0.8 / len(entries)
    for i, (name, entry) in enumerate(entries.items()):
        values = {**entry["by_domain"], "macro": entry["acceptance_length"]}
        at = [d + (i - (len(entries) - 1) / 2) * width for d in range(len(domains))]
        bars = axes.bar(
            at, [values.get(d, 0) for d in domains], width * 0.92, label=name, color=COLOURS[i % 8]
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7 if len(entries) < 5 else 6, padding=1)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel("acceptance length")
    longest = max(max([*e["by_domain"].values(), e["acceptance_length"]]) for e in entries.values())
    axes.set_ylim(0, 1.12 * longest)
    axes.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(
        fontsize=8,
        ncols=min(len(entries), 5),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        frameon=False,
    )
    figure.suptitle(title, fontsize=11)
    return _write(figure, path)


def _thresholds(entry: Report, title: str, path: Path) -> Path:
    """Figure 5: what is verified and accepted a round when only confident prefixes are kept."""
    rows = entry["threshold_sweep"]
    domains = list(rows[0]["by_domain"])
    figure, axes = _panels(len(domains), title, share_y=True)
    at = [row["threshold"] for row in rows]
    for axis, domain in zip(axes, domains, strict=True):
        accepted = [row["by_domain"][domain]["acceptance_length"] for row in rows]
        verified = [row["by_domain"][domain]["verified"] for row in rows]
        axis.bar(at, verified, 0.08, color="#c9d8e6", label="verified tokens")
        axis.bar(at, accepted, 0.08, color=COLOURS[0], label="committed tokens")
        for x, a, v in zip(at, accepted, verified, strict=True):
            axis.annotate(f"{100 * a / v:.0f}%", (x, v), ha="center", va="bottom", fontsize=7)
        axis.set_title(domain, fontsize=10)
        axis.set_xlabel("threshold on the calibrated confidence")
        axis.set_xticks(at[::2])
    axes[0].set_ylabel("tokens a round (anchor, bonus included)")
    axes[0].margins(y=0.22)
    axes[-1].legend(fontsize=8, loc="upper right")
    return _write(figure, path)


def _reliability(entry: Report, title: str, path: Path) -> Path:
    """Figure 6: forecast against observed survival by position, before and after calibration."""
    gamma = len(entry["reliability_raw"])
    slots = sorted({0, gamma // 2, gamma - 1})
    figure, axes = _panels(len(slots), title, share_y=True)
    after = entry.get("ece_calibrated", entry.get("ece_unseen"))
    for axis, slot in zip(axes, slots, strict=True):
        axis.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
        for key, colour, name, error in (
            ("reliability_raw", COLOURS[1], "raw", entry["ece_raw"][slot]),
            ("reliability_calibrated", COLOURS[0], "calibrated", after[slot]),
        ):
            curve = entry[key][slot]
            axis.plot(
                curve["forecast"], curve["survived"], color=colour, linewidth=1,
                label=f"{name}: ECE {100 * error:.1f} %",
            )  # fmt: skip
            axis.scatter(
                curve["forecast"], curve["survived"], _sizes(curve["rounds"]), color=colour
            )
        floor = f"a perfect head here: {100 * entry['ece_floor'][slot]:.1f} %"
        axis.set_title(f"position {slot + 1} ({floor})", fontsize=9)
        axis.set_xlabel("forecast survival")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.legend(fontsize=8, loc="upper left")
    axes[0].set_ylabel("survived")
    return _write(figure, path)


def _sizes(rounds: Sequence[float]) -> list[float]:
    """Marker areas: a bin of few rounds is a small dot."""
    most = max(rounds)
    return [4 + 60 * count / most for count in rounds]


def _latency(timed: Report, model: str, path: Path) -> Path:
    """Figure 4, right: what a draft costs against the length of its block, alone and with the target's step."""
    batch = next(iter(timed.values()))["batch"]
    figure, axes = _panels(2, f"{model}: a round of {batch} requests")
    for colour, (name, found) in zip(COLOURS * 3, timed.items(), strict=False):
        lengths = [int(g) for g in found["draft_ms_by_gamma"]]
        draft = list(found["draft_ms_by_gamma"].values())
        style = {"marker": "o", "markersize": 4, "color": colour, "label": name}
        axes[0].plot(lengths, draft, **style)
        axes[1].plot(lengths, list(found["round_ms_by_gamma"].values()), **style)
    for axis, text in zip(axes, ("draft, ms", "round, ms"), strict=True):
        axis.set_xlabel("block length γ")
        axis.set_ylabel(text)
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({int(g) for f in timed.values() for g in f["draft_ms_by_gamma"]}))
    axes[0].legend(fontsize=8)
    return _write(figure, path)
