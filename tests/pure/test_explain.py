"""The rounds of a request can be told from those of the others in its batch."""

from __future__ import annotations

import json

import numpy as np

from actors.core.explain import explain
from actors.core.verify_decision import StepDecision, VerifyChoice


def decision(step: int, **rows: tuple[list[float], int]) -> StepDecision:
    """One round a keyword: its survivals and how many of them were verified."""
    return StepDecision(
        step=step,
        request_ids=tuple(rows),
        survivals=np.array([s for s, _ in rows.values()], np.float32),
        caps=np.full(len(rows), 3, np.int32),
        has_draft=np.array([s[0] > 0 for s, _ in rows.values()]),
        verify_len=np.array([n for _, n in rows.values()], np.int32),
        choice=VerifyChoice(4, 0.25, "lagged"),
        room=100,
    )


def test_each_entry_is_the_requests_own_row_of_a_step_it_was_in() -> None:
    decisions = [
        decision(5, a=([0.9, 0.5, 0.2], 2), b=([0.8, 0.7, 0.6], 1)),
        decision(6, a=([0.9, 0.8, 0.7], 3)),
        decision(7, b=([0.0, 0.0, 0.0], 0), a=([0.4, 0.1, 0.05], 1)),
    ]
    entries = explain(decisions, "b")
    assert [(e["step"], e["verify_len"], e["cut_by"]) for e in entries] == [
        (5, 1, "budget"),
        (7, 0, "fallback"),
    ]
    assert entries[0]["survivals"] == [0.8, 0.7, 0.6]
    assert [e["cut_by"] for e in explain(decisions, "a")] == ["price", "none", "price"]


def test_an_entry_carries_the_budget_and_is_json() -> None:
    (entry,) = explain([decision(5, a=([0.9, 0.5, 0.2], 2))], "a")
    assert (entry["max_draft_tokens"], entry["min_survival"], entry["rule"]) == (4, 0.25, "lagged")
    json.dumps(entry)


def test_a_request_nobody_knows_has_no_entries() -> None:
    assert explain([decision(5, a=([0.9, 0.5, 0.2], 2))], "z") == []
