"""Logs of rounds as a rank tells them."""

from __future__ import annotations

from typing import Any


def a_round(first_index: int, num_committed: int, **more: Any) -> dict[str, Any]:
    return {
        "step": first_index, "first_index": first_index, "survivals": [0.9, 0.5], "min_survival": 0.25,
        "max_draft_tokens": 4, "rule": "lagged", "num_requests": 2, "num_proposed": 2,
        "num_scheduled": 1, "num_accepted": num_committed - 1, "num_committed": num_committed,
        "cut_by": "price", "explored": False, **more,
    }  # fmt: skip


def a_log(request_id: str, generation: int, first_index: int, *rounds: Any) -> dict[str, Any]:
    return {
        "request_id": request_id, "generation": generation, "first_index": first_index,
        "num_rounds": len(rounds), "has_ended": True, "rounds": list(rounds),
    }  # fmt: skip
