"""What `dspark bench --ranks` says of its phases, as numbers, as text and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from actors.core.capacity import BudgetRecord
from cluster.client import Answer
from cluster.console import table

MOST_REPORTS = 2  # after the first that shows the new load, its own budget included
MOST_DECISION_SHARE = 0.02
STEADY = 0.9  # of the largest load a rank had in a phase: below, it is filling up or running dry


@dataclass(frozen=True)
class Kill:
    """The end of the allocator's process in the middle of a phase."""

    pid: int
    num_chunks: int  # pieces of text that had come by then
    num_running: int  # streams
    num_records: int


@dataclass(frozen=True)
class Phase:
    """One load, served to its end."""

    name: str
    crowded: str  # the rank with the crowd
    seconds: float
    records: list[BudgetRecord]
    answers: list[Answer]  # of the same streams in the same order in every phase
    errors: list[str]
    num_chunks: int
    decision_share: dict[str, float]  # of the seconds of each rank's steps
    allocator: dict[str, Any]  # its counts at the end
    kill: Kill | None = None
    is_back: bool = False

    def of(self, rank: str) -> list[BudgetRecord]:
        return [record for record in self.records if record.budget.rank == rank]

    def steady(self, rank: str) -> list[BudgetRecord]:
        """The records of a rank under its full load."""
        own = self.of(rank)
        most = max((record.num_requests for record in own), default=0)
        return [record for record in own if record.num_requests >= STEADY * most]


def reports_to_follow(before: Phase, after: Phase, rank: str) -> int | None:
    """Reports of a rank, from the first that shows its new load, until its budget a request is nearer to the new median
    than to the old one: 1 when the very first of them brought it. None when that never happened."""
    old = median(_per_request(record) for record in before.steady(rank))
    new = median(_per_request(record) for record in after.steady(rank))
    own, full = after.of(rank), after.steady(rank)
    seen = own[own.index(full[0]) :]
    for count, record in enumerate(seen, start=1):
        budget = _per_request(record)
        if abs(budget - new) < abs(budget - old):
            return count
    return None


def _per_request(record: BudgetRecord) -> float:
    return record.budget.max_draft_tokens / max(record.num_requests, 1)


def summary(phases: Sequence[Phase], policy: str) -> dict[str, Any]:
    """The report. `holds`: budgets differ by rank and follow the load, no text changed, no stream failed."""
    before, switched, drill = phases
    ranks = sorted({record.budget.rank for record in before.records})
    medians = {
        phase.name: {rank: _medians(phase.steady(rank)) for rank in ranks if phase.of(rank)}
        for phase in phases
    }
    budgets = [entry["budget"] for entry in medians[before.name].values()]
    follow = {rank: reports_to_follow(before, switched, rank) for rank in ranks}
    follows = all(count is not None and count <= MOST_REPORTS for count in follow.values())
    equal = {phase.name: _same(before, phase) for phase in (switched, drill)}
    errors = [error for phase in phases for error in phase.errors]
    share = max(max(phase.decision_share.values()) for phase in phases)
    differ = len(set(budgets)) > 1
    return {
        "policy": policy,
        "ranks": ranks,
        "medians": medians,
        "budgets_differ": differ,
        "reports_to_follow": follow,
        "tokens_per_s": {phase.name: _rate(phase) for phase in phases},
        "decision_share": {phase.name: phase.decision_share for phase in phases},
        "decision_share_ok": share <= MOST_DECISION_SHARE,
        "equal_texts": equal,
        "errors": errors,
        "drill": {
            "kill": asdict(drill.kill) if drill.kill else None,
            "num_chunks": drill.num_chunks,
            "is_back": drill.is_back,
            "num_failed": len(drill.errors),
        },
        "num_by_rule": {phase.name: dict(_rules(phase)) for phase in phases},
        "prediction_error": {p.name: p.allocator.get("prediction_error") for p in phases},
        "num_streams": len(before.answers),
        "budgets": {phase.name: [_row(record) for record in phase.records] for phase in phases},
        "holds": bool(
            differ and follows and all(equal.values()) and not errors and drill.is_back
            and drill.kill and drill.kill.num_running
        ),
    }  # fmt: skip


def _medians(records: Sequence[BudgetRecord]) -> dict[str, float]:
    return {
        "requests": median(record.num_requests for record in records),
        "budget": median(record.budget.max_draft_tokens for record in records),
        "budget_per_request": round(median(_per_request(record) for record in records), 3),
        "price": round(median(record.budget.min_survival for record in records), 4),
        "used": median(record.budget_used for record in records),
        "step_time_s": round(median(record.step_time_s for record in records), 4),
        "num_reports": len(records),
    }


def _same(first: Phase, second: Phase) -> bool:
    def content(phase: Phase) -> list[tuple[str, int, str | None]]:
        return [(a.text, a.completion_tokens, a.finish_reason) for a in phase.answers]

    return content(first) == content(second)


def _rate(phase: Phase) -> float:
    return round(sum(answer.completion_tokens for answer in phase.answers) / phase.seconds, 2)


def _rules(phase: Phase) -> Counter[str]:
    return Counter(record.budget.rule for record in phase.records)


def _row(record: BudgetRecord) -> dict[str, Any]:
    budget = record.budget
    return {
        "rank": budget.rank,
        "step": budget.based_on_step,
        "requests": record.num_requests,
        "budget": budget.max_draft_tokens,
        "price": round(budget.min_survival, 4),
        "rule": budget.rule,
        "used": record.budget_used,
    }


def text(report: dict[str, Any]) -> str:
    """For a person."""
    rows = [
        [
            phase, rank, f"{m['requests']:g}", f"{m['budget']:g}", f"{m['price']:.3f}",
            f"{m['used']:g}", f"{m['step_time_s'] * 1e3:.0f}",
            f"{100 * report['decision_share'][phase][rank]:.2f} %",
        ]
        for phase, ranks in report["medians"].items()
        for rank, m in ranks.items()
    ]  # fmt: skip
    header = ["load", "rank", "requests", "budget", "price", "used", "step ms", "deciding"]
    drill, rates = report["drill"], report["tokens_per_s"]
    return "\n".join(
        [
            f"\npolicy {report['policy']}; medians over the reports of a full load",
            table(header, rows),
            f"budgets differ by rank: {_yes(report['budgets_differ'])}; reports until a budget followed the "
            f"load: {', '.join(f'{rank} {count}' for rank, count in report['reports_to_follow'].items())}",
            f"allocator killed while {(drill['kill'] or {}).get('num_running', 0)} streams ran: texts equal: "
            f"{_yes(report['equal_texts']['drill'])}; failed streams: {drill['num_failed']}; it came back: "
            f"{_yes(drill['is_back'])}",
            f"texts equal after the switch: {_yes(report['equal_texts']['switched'])}",
            "tokens/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()),
        ]
    )


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def figure(phases: Sequence[Phase], folder: Path) -> Path | None:
    """Budget and load of every rank over the reports; None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    records = [record for phase in phases for record in phase.records]
    ranks = sorted({record.budget.rank for record in records})
    canvas, (budgets, requests) = plt.subplots(2, 1, sharex=True, figsize=(8.0, 5.5))
    for rank in ranks:
        own = [(at, r) for at, r in enumerate(records) if r.budget.rank == rank]
        at = [place for place, _ in own]
        budgets.step(at, [r.budget.max_draft_tokens for _, r in own], where="post", label=rank)
        requests.step(at, [r.num_requests for _, r in own], where="post", label=rank)
    start = 0
    for phase in phases:
        for axes in (budgets, requests):
            axes.axvline(start, color="0.6", linewidth=0.8)
            if phase.kill:
                axes.axvline(start + phase.kill.num_records, color="#D55E00", linestyle="--")
        label = f"{phase.name} (dashed: allocator killed)" if phase.kill else phase.name
        budgets.text(start, 1.02, f" {label}", transform=budgets.get_xaxis_transform(), fontsize=8)
        start += len(phase.records)
    budgets.set_ylabel("budget (draft tokens a step)")
    requests.set_ylabel("requests")
    requests.set_xlabel("report")
    requests.legend()
    canvas.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "budgets.png"
    canvas.savefig(path, dpi=150)
    plt.close(canvas)
    return path
