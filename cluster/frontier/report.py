"""From measured cells to what `dspark bench` says. Pure: rows in, one JSON object out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.frontier.plan import BRACKET, LAGGED, MTP1, NONE, Contender, is_fixed
from cluster.frontier.statistics import Spread, at_throughput, best, paired, spread_of

Row = Mapping[str, Any]
ByRepeat = dict[int, float]

NODE, USER = "node_tokens_per_s", "user_tokens_per_s"
_MEASURED = (NODE, USER, "ttft_s", "ttft_p95_s", "acceptance_length", "scheduled_per_round")
SPREAD_MEANS = "half of (largest − smallest repeat), in the unit of the median; ratios are formed within each repeat"


class Cells:
    """Measured rows, by contender, concurrency, temperature and repeat."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if not row["num_errors"]]
        self.errors = [row for row in rows if row["num_errors"]]
        self.temperatures = sorted({row["temperature"] for row in self.rows})
        self.concurrencies = sorted({row["concurrency"] for row in self.rows})

    def of(self, label: str, temperature: float, concurrency: int) -> list[Row]:
        """The repeats of one point, in their order."""
        wanted = (label, temperature, concurrency)
        found = [
            row
            for row in self.rows
            if (row["label"], row["temperature"], row["concurrency"]) == wanted
        ]
        return sorted(found, key=lambda row: row["repeat"])

    def by_repeat(self, label: str, temperature: float, concurrency: int, name: str) -> ByRepeat:
        rows = self.of(label, temperature, concurrency)
        return {row["repeat"]: row[name] for row in rows if row[name] is not None}

    def curve(self, label: str, temperature: float, repeat: int) -> list[tuple[float, float]]:
        """(node, user) tokens/s of one repeat, over the concurrencies."""
        points = []
        for concurrency in self.concurrencies:
            for row in self.of(label, temperature, concurrency):
                if row["repeat"] == repeat and row[USER] is not None:
                    points.append((row[NODE], row[USER]))
        return points


def summary(
    rows: Sequence[Row], contenders: Sequence[Contender], *, is_reproducible: bool
) -> dict[str, Any]:
    """The report of a run.

    Args:
        rows: of all cells: what `rates.rates_of` gives, with label, concurrency, temperature and repeat.
        contenders: in the order of the tables.
        is_reproducible: texts must be equal whatever the policy.
    """
    cells = Cells(rows)
    parity = parity_of(cells, [c.label for c in contenders if not c.is_peer], is_reproducible)
    by_temperature = {f"{t:g}": _ratios(cells, contenders, t) for t in cells.temperatures}
    first = by_temperature.get(f"{cells.temperatures[0]:g}", {}) if cells.temperatures else {}
    errors = [
        {name: row[name] for name in ("label", "concurrency", "temperature", "repeat", "error")}
        for row in cells.errors
    ]
    return {
        "frontier": {f"{t:g}": _frontier(cells, contenders, t) for t in cells.temperatures},
        "ratio_to_best_fixed": first.get("ratio_to_best_fixed", {}),
        "over_mtp1": first.get("over_mtp1", {}),
        "spread": first.get("spread", {}),
        "spread_means": SPREAD_MEANS,
        "ratios_at_temperature": cells.temperatures[0] if cells.temperatures else None,
        "by_temperature": by_temperature,
        "parity": parity,
        "errors": errors,
        "error_share": _error_share(rows),
        "num_disturbed": sum(bool(row.get("is_disturbed")) for row in cells.rows),
        "holds": not errors and (parity["equal"] or not is_reproducible),
    }


def _error_share(rows: Sequence[Row]) -> float:
    served = sum(row["num_requests"] for row in rows)
    return sum(row["num_errors"] for row in rows) / served if served else 0.0


def _frontier(cells: Cells, contenders: Sequence[Contender], temperature: float) -> dict[str, Any]:
    """{contender: {concurrency: {what: median, spread, repeats}}}."""
    lines: dict[str, Any] = {}
    for contender in contenders:
        points = {}
        for concurrency in cells.concurrencies:
            rows = cells.of(contender.label, temperature, concurrency)
            values = {name: spread_of([row[name] for row in rows]) for name in _MEASURED}
            if rows:
                points[str(concurrency)] = {
                    name: value.as_json() if value else None for name, value in values.items()
                }
        if points:
            lines[contender.label] = points
    return lines


def _ratios(cells: Cells, contenders: Sequence[Contender], temperature: float) -> dict[str, Any]:
    ratios: dict[str, dict[str, Spread | None]] = {
        "ratio_to_best_fixed": {},
        "over_mtp1": {},
        "over_mtp1_per_node": {},
        "over_mtp1_without_drift": {},
    }
    best_fixed = {}
    fixed = [c.label for c in contenders if is_fixed(c.label)]
    for count in cells.concurrencies:

        def rates(label: str, name: str = NODE, count: int = count) -> ByRepeat:
            return cells.by_repeat(label, temperature, count, name)

        key = str(count)
        rival = best({label: rates(label) for label in fixed})
        if rival is not None:
            best_fixed[key] = rival
            ratios["ratio_to_best_fixed"][key] = paired(rates(LAGGED), rates(rival))
        ratios["over_mtp1"][key] = paired(rates(LAGGED, USER), rates(MTP1, USER))
        ratios["over_mtp1_per_node"][key] = paired(rates(LAGGED), rates(MTP1))
        ratios["over_mtp1_without_drift"][key] = paired(
            _over(rates(LAGGED, USER), rates(NONE, USER)),
            _over(rates(MTP1, USER), rates(BRACKET, USER)),
        )
    known = {name: {k: v for k, v in of.items() if v is not None} for name, of in ratios.items()}
    return {
        **{name: {k: round(v.median, 4) for k, v in of.items()} for name, of in known.items()},
        "best_fixed": best_fixed,
        "over_mtp1_at_matched_throughput": _matched(cells, temperature),
        "spread": {name: {k: round(v.spread, 4) for k, v in of.items()} for name, of in known.items()},
    }  # fmt: skip


def _over(upper: ByRepeat, lower: ByRepeat) -> ByRepeat:
    return {repeat: upper[repeat] / lower[repeat] for repeat in upper.keys() & lower.keys()}


def _matched(cells: Cells, temperature: float) -> list[dict[str, Any]]:
    """For each load of MTP-1: the speed per user that `lagged` gives at the throughput MTP-1 had there."""
    matched = []
    for concurrency in cells.concurrencies:
        found, bounds, nodes, users = [], [], [], []
        for row in cells.of(MTP1, temperature, concurrency):
            curve = cells.curve(LAGGED, temperature, row["repeat"])
            at = at_throughput(curve, row[NODE])
            if at is None or not row[USER]:
                continue
            found.append(at.user_tokens_per_s / row[USER])
            bounds.append(at.is_bound)
            nodes.append(row[NODE])
            users.append(at.user_tokens_per_s)
        ratio = spread_of(found)
        if ratio is not None:
            matched.append(
                {
                    "mtp1_concurrency": concurrency,
                    "node_tokens_per_s": round(Spread(tuple(nodes)).median, 4),
                    "user_tokens_per_s": round(Spread(tuple(users)).median, 4),
                    "ratio": round(ratio.median, 4),
                    "spread": round(ratio.spread, 4),
                    "num_repeats": len(found),
                    "is_lower_bound": any(bounds),
                }
            )
    return matched


def parity_of(cells: Cells, labels: Sequence[str], is_reproducible: bool) -> dict[str, Any]:
    """Whether every request of ours said the same under every policy, concurrency and repeat."""
    said: dict[tuple[float, int], str] = {}
    compared, different = 0, []
    for row in cells.rows:
        if row["label"] not in labels:
            continue
        for index, digest in enumerate(row["digests"]):
            compared += 1
            first = said.setdefault((row["temperature"], index), digest)
            if digest != first:
                cell = f"{row['label']}, {row['concurrency']} streams, temperature {row['temperature']:g}"
                different.append(f"request {index}: {cell}, repeat {row['repeat']}")
    return {
        "equal": not different,
        "is_promised": is_reproducible,
        "num_texts": compared,
        "num_requests": len(said),
        "num_different": len(different),
        "different": different[:20],
    }
