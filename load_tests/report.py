"""What a run came to: a table, thresholds, JSON, and a picture. Reads the records only, so it can be run again later.

`python -m load_tests.report RUN_DIR` draws `load.png` and prints the table of a finished run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load_tests.sse import StreamRecord

RECORDS, SUMMARY, PICTURE = "streams.jsonl", "summary.json", "load.png"


@dataclass(frozen=True)
class Entry:
    """One finished, failed or aborted stream; times in seconds since the run began."""

    tenant: str
    at_s: float
    seconds: float
    ttft_s: float | None
    tpot_s: float | None
    max_gap_s: float
    tokens: int
    accepted: int
    rejected: int
    aborted: bool
    error: str | None

    @classmethod
    def of(cls, record: StreamRecord, began_s: float, ended_s: float, error: str | None) -> Entry:
        """Summarise a record that was closed, broken off or refused (`error`)."""
        return cls(
            tenant=record.tenant,
            at_s=record.started_s - began_s,
            seconds=ended_s - record.started_s,
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            max_gap_s=record.max_gap_s,
            tokens=record.completion_tokens or 0,
            accepted=record.accepted_tokens,
            rejected=record.rejected_tokens,
            aborted=record.aborted,
            error=error,
        )


@dataclass(frozen=True)
class Thresholds:
    """What `--check` refuses. None = not asked."""

    max_error_share: float = 0.0
    max_ttft_p95_s: float | None = None
    max_gap_p95_s: float | None = None
    min_tokens_per_s: float | None = None
    min_streams: int = 1

    def failures(self, summary: dict[str, Any]) -> list[str]:
        """One line for each threshold that did not hold."""
        found = []
        if summary["streams"] < self.min_streams:
            found.append(f"{summary['streams']} streams ended well, {self.min_streams} are needed")
        if summary["error_share"] > self.max_error_share:
            found.append(f"error share {summary['error_share']:.3f} > {self.max_error_share:.3f}")
        for name, limit in (("ttft_s", self.max_ttft_p95_s), ("max_gap_s", self.max_gap_p95_s)):
            value = summary[name]["p95"]
            if limit is not None and (value is None or value > limit):
                found.append(f"{name} p95 {value} > {limit}")
        if self.min_tokens_per_s is not None and summary["tokens_per_s"] < self.min_tokens_per_s:
            found.append(f"tokens/s {summary['tokens_per_s']} < {self.min_tokens_per_s}")
        return found


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _spread(values: Iterable[float | None]) -> dict[str, float | None]:
    known = [v for v in values if v is not None]
    return {f"p{p}": _rounded(quantile(known, p / 100)) for p in (50, 95, 99)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def summarise(entries: Sequence[Entry], seconds: float) -> dict[str, Any]:
    """The whole run and, under `tenants`, each tenant alone. Aborted streams count no tokens."""
    summary = _summary(entries, seconds)
    names = sorted({entry.tenant for entry in entries})
    summary["tenants"] = {
        name: _summary([e for e in entries if e.tenant == name], seconds) for name in names
    }
    return summary


def _summary(entries: Sequence[Entry], seconds: float) -> dict[str, Any]:
    whole = [e for e in entries if e.error is None and not e.aborted]
    failed = [e for e in entries if e.error is not None]
    tokens, accepted = sum(e.tokens for e in whole), sum(e.accepted for e in whole)
    return {
        "seconds": round(seconds, 1),
        "streams": len(whole),
        "aborted": sum(e.aborted for e in entries),
        "errors": len(failed),
        "error_share": len(failed) / max(1, len(entries)),
        "first_errors": [e.error for e in failed[:3]],
        "completion_tokens": tokens,
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 2),
        "tokens_per_s_per_user": _rounded(quantile([1 / e.tpot_s for e in whole if e.tpot_s], 0.5)),
        "accepted_share": round(accepted / max(1, accepted + sum(e.rejected for e in whole)), 4),
        "ttft_s": _spread(e.ttft_s for e in whole),
        "tpot_s": _spread(e.tpot_s for e in whole),
        "max_gap_s": _spread(e.max_gap_s for e in whole),
    }


def table(summary: dict[str, Any]) -> str:
    """Rows for a terminal: the tenants, then all of them."""
    head = (
        "tenant",
        "streams",
        "aborted",
        "errors",
        "tok/s",
        "tok/s/user",
        "TTFT p50",
        "p95",
        "TPOT p50",
        "gap p95",
    )
    rows = [head]
    for name, part in [*summary["tenants"].items(), ("all", summary)]:
        spread = (
            part["ttft_s"]["p50"],
            part["ttft_s"]["p95"],
            part["tpot_s"]["p50"],
            part["max_gap_s"]["p95"],
        )
        cells = (
            part["streams"],
            part["aborted"],
            part["errors"],
            part["tokens_per_s"],
            part["tokens_per_s_per_user"],
        )
        rows.append((name, *(_cell(c) for c in cells), *(_milliseconds(s) for s in spread)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.0f} ms"


def write(run_dir: Path, entries: Sequence[Entry], summary: dict[str, Any]) -> None:
    """Write the records and the summary of a run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(entry)) + "\n" for entry in entries)
    (run_dir / RECORDS).write_text(lines, encoding="utf-8")
    (run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def read(run_dir: Path) -> tuple[list[Entry], dict[str, Any]]:
    """Read what `write` wrote."""
    lines = (run_dir / RECORDS).read_text(encoding="utf-8").splitlines()
    summary: dict[str, Any] = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    return [Entry(**json.loads(line)) for line in lines], summary


def draw(entries: Sequence[Entry], summary: dict[str, Any], png: Path) -> None:
    """Draw streams under way, first-token times and speed per user against time, by tenant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7.5), dpi=100, sharex=True)
    moments = [summary["seconds"] * i / 200 for i in range(201)]
    busy = [sum(e.at_s <= t < e.at_s + e.seconds for e in entries) for t in moments]
    axes[0].fill_between(moments, busy, step="post", alpha=0.4, color="tab:gray")
    axes[0].set_ylabel("streams under way")
    for index, name in enumerate(sorted({e.tenant for e in entries})):
        mine = [e for e in entries if e.tenant == name and e.error is None]
        style = {"s": 14, "color": f"C{index}", "label": name}
        first = [(e.at_s, e.ttft_s) for e in mine if e.ttft_s is not None]
        speed = [(e.at_s, 1 / e.tpot_s) for e in mine if e.tpot_s]
        for axis, points in ((axes[1], first), (axes[2], speed)):
            axis.scatter([x for x, _ in points], [y for _, y in points], **style)
    failed = [e.at_s for e in entries if e.error is not None]
    axes[1].scatter(failed, [0.0] * len(failed), marker="x", color="red", label="failed")
    axes[1].set_ylabel("first token, s")
    axes[2].set_ylabel("tokens/s of a user")
    axes[2].set_xlabel("start of the stream, s")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[1].legend(ncols=4, fontsize=8)
    figure.suptitle(
        f"{summary['streams']} streams, {summary['tokens_per_s']:.1f} tokens/s, {summary['errors']} errors"
    )
    figure.tight_layout()
    figure.savefig(png)
    pyplot.close(figure)


def main() -> int:
    """Print the table of a run and draw it again."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.report", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    if not (run_dir / RECORDS).is_file():
        print(f"{run_dir}: no {RECORDS} there; give the --out folder of a run", file=sys.stderr)
        return 2
    entries, summary = read(run_dir)
    draw(entries, summary, run_dir / PICTURE)
    print(table(summary))
    print(run_dir / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
