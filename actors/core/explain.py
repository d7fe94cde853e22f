"""Why a request was verified as far as it was, in words a person can read (contract C11)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.core.verify_decision import StepDecision


def explain(decisions: Iterable[StepDecision], request_id: str) -> list[dict[str, Any]]:
    """One entry for each of these steps in which the request had a round, oldest first; JSON-able."""
    return [
        _entry(decision, decision.request_ids.index(request_id))
        for decision in decisions
        if request_id in decision.request_ids
    ]


def _entry(decision: StepDecision, row: int) -> dict[str, Any]:
    return {
        "step": decision.step,
        "survivals": [round(float(survival), 4) for survival in decision.survivals[row]],
        "min_survival": decision.choice.min_survival,
        "max_draft_tokens": decision.choice.max_draft_tokens,
        "rule": decision.choice.rule,
        "verify_len": int(decision.verify_len[row]),
        "cut_by": decision.cut_by(row),
    }
