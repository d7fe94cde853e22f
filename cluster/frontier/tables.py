"""The report as Markdown: for a README, and readable in a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]
DASH = "–"


def markdown(report: Report) -> str:
    """Everything a reader must know to trust the numbers, then the numbers."""
    parts = [_head(report)]
    for temperature, lines in report["frontier"].items():
        parts += [f"### Temperature {temperature}", _rates(lines), _ratios(report, temperature)]
    parts.append(_verdict(report))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> str:
    machine, model = report["machine"], report["model"]
    lines = [
        f"`{report['command']}`, {report['date']}",
        f"{model['name']}, {model['dtype']}, numerics {model['numerics']}; {machine['cpu']}, "
        f"{machine['cores']} cores ({machine['flags']})",
        f"Per point {report['repeats']} repeats, interleaved; median ± {report['spread_means']}.",
        *(f"Left out: {reason}." for reason in report["left_out"]),
        *(f"**Warning**: {warning}." for warning in report["warnings"]),
    ]
    return "  \n".join(lines)


def _rates(lines: Mapping[str, Any]) -> str:
    """A row for each contender, a column for each concurrency: tokens/s of the node, and of a user."""
    counts = sorted({int(count) for points in lines.values() for count in points})
    tables = []
    for title, name, digits in (
        ("tokens/s of the node", "node_tokens_per_s", 1),
        ("tokens/s of a user", "user_tokens_per_s", 1),
        ("seconds to the first token", "ttft_s", 2),
        ("committed tokens a round", "acceptance_length", 2),
        ("draft tokens verified a request and round", "scheduled_per_round", 2),
    ):
        header = [title, *(f"{count} stream{'s' * (count > 1)}" for count in counts)]
        rows = [
            [label, *(_value((points.get(str(count)) or {}).get(name), digits) for count in counts)]
            for label, points in lines.items()
        ]
        if any(cell != DASH for row in rows for cell in row[1:]):
            tables.append(_table(header, rows))
    return "\n\n".join(tables)


def _ratios(report: Report, temperature: str) -> str:
    of = report["by_temperature"][temperature]
    counts = sorted(
        {int(count) for name in ("ratio_to_best_fixed", "over_mtp1") for count in of[name]}
    )
    rows = []
    for count in map(str, counts):
        rival = of["best_fixed"].get(count, "")
        fixed = _ratio(of, "ratio_to_best_fixed", count)
        rows.append(
            [
                count,
                f"{fixed} ({rival})" if fixed != DASH else DASH,
                _ratio(of, "over_mtp1", count),
                _ratio(of, "over_mtp1_without_drift", count),
            ]
        )
    header = [
        "streams",
        "`lagged` over the best fixed, node",
        "over MTP-1, user",
        "the same, drift between the clusters taken out",
    ]
    tables = [_table(header, rows)] if rows else []
    matched = [
        [
            str(point["mtp1_concurrency"]),
            f"{point['node_tokens_per_s']:.1f}",
            f"{'≥ ' * point['is_lower_bound']}{point['ratio']:.2f} ± {point['spread']:.2f}",
        ]
        for point in of["over_mtp1_at_matched_throughput"]
    ]
    if matched:
        header = [
            "streams of MTP-1",
            "its tokens/s of the node",
            "`lagged` over MTP-1, user, there",
        ]
        tables.append(_table(header, matched))
    return "\n\n".join(tables)


def _verdict(report: Report) -> str:
    parity = report["parity"]
    lines = []
    if parity["num_texts"]:
        said = "equal" if parity["equal"] else f"**{parity['num_different']} DIFFER**"
        lines.append(
            f"Texts of {parity['num_requests']} requests over all policies, concurrencies and repeats "
            f"({parity['num_texts']} answers): {said}."
        )
        if not parity["equal"] and not parity["is_promised"]:
            lines.append("(Numerics are not `reproducible`: equality is not promised.)")
    errors = report["errors"]
    if errors:
        first = errors[0]
        lines.append(
            f"**{len(errors)} measurements had errors**, first {first['label']} with {first['concurrency']} "
            f"streams: {first['error']}"
        )
    if report["num_disturbed"]:
        lines.append(f"Other load was seen before {report['num_disturbed']} measurements.")
    return "  \n".join(lines)


def _ratio(of: Mapping[str, Any], name: str, count: str) -> str:
    if count not in of[name]:
        return DASH
    return f"{of[name][count]:.2f} ± {of['spread'][name][count]:.2f}"


def _value(value: Mapping[str, Any] | None, digits: int) -> str:
    if value is None:
        return DASH
    return f"{value['median']:.{digits}f} ± {value['spread']:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )
