"""What a person and a program are told of storms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from cluster.chaos.checker import Tally, Verdict
from cluster.chaos.plan import KINDS
from cluster.console import table


def report(verdict: Verdict) -> dict[str, Any]:
    """The object of `--json`. `kills` counts faults of every kind that struck; times in seconds."""
    known = [kind for kind in KINDS if kind in verdict.by_kind]
    others = [kind for kind in verdict.by_kind if kind not in KINDS]
    return {
        "ok": verdict.is_clean,
        **_shown(verdict.total),
        "leaks": verdict.num_leaks,
        "problems": verdict.problems,
        "evidence": dict(sorted(verdict.counts.items())),
        "by_kind": {kind: _shown(verdict.by_kind[kind]) for kind in (*known, *others)},
    }


def _shown(tally: Tally) -> dict[str, Any]:
    return {
        "kills": tally.num_struck,
        "asked": tally.num_asked,
        "streams": tally.num_streams,
        "failed_streams": tally.num_failed,
        "retryable_errors": tally.num_retryable,
        "lost_tokens": tally.difference.num_lost,
        "repeated_tokens": tally.difference.num_repeated,
        "changed_tokens": tally.difference.num_changed,
        "unrecovered": tally.num_unrecovered,
        "recovery_s": _spread(tally.recovery_s),
        "pause_s": _spread(tally.pause_s),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}


HEADER = [
    *("kind", "struck", "streams", "failed", "retried", "lost", "repeated", "changed"),
    *("recovery s", "longest", "pause s", "longest"),
]


def text(told: dict[str, Any], kept_in: Sequence[str], num_shown: int = 20) -> str:
    """The table by kind, what went wrong, and the verdict in one line."""
    rows = [_row(kind, counts) for kind, counts in told["by_kind"].items() if counts["streams"]]
    lines = [table(HEADER, [*rows, _row("all", told)])]
    if evidence := told["evidence"]:
        lines.append("effects: " + ", ".join(f"{name} {n}" for name, n in evidence.items()))
    problems = told["problems"]
    lines += [f"  {problem}" for problem in problems[:num_shown]]
    if len(problems) > num_shown:
        lines.append(f"  … and {len(problems) - num_shown} more")
    lines += [f"history {path}" for path in kept_in]
    if told["kills"] < told["asked"]:
        never = [name for name, n in told["by_kind"].items() if n["asked"] and not n["kills"]]
        lines.append(
            f"the time was over after {told['kills']} of {told['asked']} faults"
            + (f"; never struck, raise --seconds: {', '.join(never)}" if never else "")
        )
    verdict = "PASS" if told["ok"] else "FAIL"
    lines.append(
        f"{verdict}: {told['kills']} faults, {told['streams']} streams, {told['failed_streams']} failed, "
        f"{told['lost_tokens']} tokens lost, {told['repeated_tokens']} repeated, {told['changed_tokens']} changed, "
        f"{told['leaks']} leaks, {told['unrecovered']} not recovered"
    )
    return "\n".join(lines)


def _row(kind: str, counts: dict[str, Any]) -> list[str]:
    numbers = ("kills", "streams", "failed_streams", "retryable_errors")
    tokens = ("lost_tokens", "repeated_tokens", "changed_tokens")
    row = [kind, *(str(counts[name]) for name in (*numbers, *tokens))]
    for spread in (counts["recovery_s"], counts["pause_s"]):
        row += [f"{spread['median']:.1f}", f"{spread['max']:.1f}"] if spread else ["–", "–"]
    return row
