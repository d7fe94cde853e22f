"""What the counters of a member say it still holds after a storm."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.chaos.view import held_by

IDLE_RANK: dict[str, Any] = {
    "is_idle": True,
    "num_free_blocks": 128,
    "num_blocks": 128,
    "num_reservations": 0,
    "num_running": 0,
    "num_waiting": 0,
    "idle_problems": [],
    "num_idle_problems": 0,
}


def test_members_at_rest_hold_nothing() -> None:
    assert (
        held_by(IDLE_RANK)
        == held_by({"open_requests": 0, "num_blocks": 255})
        == held_by({"num_budgets": 7})
        == []
    )


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"is_idle": False}, "not idle"),
        ({"num_free_blocks": 127}, "127 of 128 KV blocks"),
        ({"num_reservations": 1}, "num_reservations 1"),
        ({"num_running": 2}, "num_running 2"),
        ({"num_waiting": 1}, "num_waiting 1"),
        ({"num_idle_problems": 1}, "1 problems in idle checks"),
        ({"idle_problems": ["1 leases are open"]}, "1 leases are open"),
        ({"error": "TimeoutError()"}, "no counters: TimeoutError()"),
        ({"open_requests": 3}, "open_requests 3"),
    ],
)
def test_whatever_is_held_is_named(stats: dict[str, Any], said: str) -> None:
    assert any(said in text for text in held_by({**IDLE_RANK, **stats}))
