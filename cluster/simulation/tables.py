"""The report as text for people, and as CSV for everything else."""

from __future__ import annotations

import csv
import io

from cluster.console import table
from cluster.simulation.experiments import Point, Report

HEADER = [
    "load",
    "system",
    "tok/s/rank",
    "tok/s/user",
    "verified",
    "accepted",
    "step ms",
    "p99 tpot ms",
]


def text(report: Report) -> str:
    """Assumptions, every point (or a summary of random configurations), then the answers."""
    lines = [report.scenario.title, ""]
    lines += [f"  - {assumption}" for assumption in report.scenario.assumptions]
    if report.scenario.kind == "random_configurations":
        lines += ["", _gains(report)]
    else:
        lines += ["", table(HEADER, [_row(point) for point in report.points])]
        if len(report.scenario.tenants) > 1:
            lines += ["", _by_tenant(report)]
    lines += ["", *_answers(report)]
    return "\n".join(lines)


def _row(point: Point) -> list[str]:
    result = point.result
    return [
        point.load,
        result.system,
        f"{result.throughput_per_rank:.0f}",
        f"{result.tps:.1f}",
        f"{result.budget_per_request:.2f}",
        f"{result.acceptance_length:.2f}",
        f"{result.step_time_s * 1e3:.2f}",
        f"{result.tpot_p99_s * 1e3:.1f}",
    ]


def _by_tenant(report: Report) -> str:
    names = [tenant.name for tenant in report.scenario.tenants]
    rows = [
        [point.load, point.result.system]
        + [f"{point.result.by_tenant[name]['tps']:.1f}" for name in names]
        for point in report.points
    ]
    return table(["load", "tok/s/user of", *names], rows)


def _gains(report: Report) -> str:
    """Ten worst, ten best of the random configurations."""
    gains = report.answers["gains"]
    ours, base = report.answers["compared"]
    order = sorted(range(len(gains)), key=lambda at: float(gains[at]))
    shown = order if len(order) <= 20 else [*order[:10], *order[-10:]]
    per = len(report.scenario.systems)
    rows = [[f"{gains[at]:+.2%}", report.points[per * at].load] for at in shown]
    return table([f"{ours} over {base}", "configuration"], rows)


def _answers(report: Report) -> list[str]:
    answers, lines = report.answers, []
    published = report.scenario.published
    if published is not None:
        gain = answers[f"gain_at_{published.sla_tps:g}"]
        lines.append(
            f"gain at {published.sla_tps:g} tok/s/user: {gain:+.1%} (published {published.gain_at_sla:+.0%})"
        )
        rows = [
            [load, f"{value:.2f}", f"{answers['published_budget'][load]:.2f}"]
            for load, value in answers["budget_by_concurrency"].items()
        ]
        lines.append(table(["requests", "verified a request", "published"], rows))
    for name, value in answers.get("ratios", {}).items():
        lines.append(f"{answers['compared'][0]} over {name}: {value - 1:+.1%}")
    for name, lowest in answers.get("over_best_fixed", {}).get("lowest", {}).items():
        lines.append(f"{name} over the best fixed length, lowest over loads: {lowest:.3f}")
    if "lowest_gain" in answers:
        lines.append(
            f"gain: mean {answers['joint_gain']:+.2%}, lowest {answers['lowest_gain']:+.2%}, "
            f"highest {answers['highest_gain']:+.2%}"
        )
    return lines


def csv_text(report: Report) -> str:
    """Every number of every point; lists and tenants are left to the JSON."""
    out = io.StringIO()
    rows = [{"load": point.load, **point.result.row()} for point in report.points]
    flat = [{k: v for k, v in row.items() if isinstance(v, str | float | int)} for row in rows]
    writer = csv.DictWriter(out, fieldnames=list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()
