"""What the live page says of a rank and of a round, in words."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from actors.core.prefix_scheduler import UNLIMITED
from actors.core.step_decision import CutRule
from cluster.live_page import decisions, pressure, state, why
from cluster.observation import Observation

ROUND = {
    "request_id": "r",
    "survivals": [0.9, 0.6, 0.21, 0.1],
    "num_scheduled": 2,
    "num_accepted": 1,
    "cut_by": "price",
    "explored": False,
}
STEP = {
    "step": 7,
    "rule": "lagged",
    "max_draft_tokens": 12,
    "min_survival": 0.35,
    "num_requests": 1,
    "num_scheduled": 2,
    "batch_tokens": 3,
    "rounds": [ROUND],
}


def rank(**values: Any) -> dict[str, Any]:
    return {
        "num_running": 0,
        "max_running": 4,
        "num_waiting": 0,
        "num_blocks": 100,
        "num_free_blocks": 100,
        **values,
    }


@pytest.mark.parametrize(
    ("values", "load", "words"),
    [
        ({}, "idle", "nothing runs"),
        ({"num_running": 3}, "busy", "3 of 4 places are taken, nobody waits"),
        ({"num_running": 4}, "saturated", "all 4 places"),
        ({"num_running": 4, "num_waiting": 1}, "saturated", "1 request waiting: 4 of 4"),
        ({"num_running": 2, "num_free_blocks": 5}, "saturated", "95% of its KV cache"),
    ],
)
def test_a_rank_says_how_full_it_is_and_why(values: Any, load: str, words: str) -> None:
    found, reason = pressure(rank(**values))
    assert found == load and words in reason


def test_a_length_is_explained_by_what_cut_it() -> None:
    assert why(ROUND, STEP) == "Token 3 survives with 21%, less than the price λ = 35%."
    budget = why({**ROUND, "cut_by": "budget"}, STEP)
    assert "budget K = 12" in budget and "Token 3 survives with 21%" in budget


@pytest.mark.parametrize("rule", get_args(CutRule))
def test_every_rule_has_a_sentence(rule: str) -> None:
    said = why({**ROUND, "cut_by": rule}, STEP)
    assert said.endswith(".") and "Cut by" not in said
    assert why({**ROUND, "cut_by": "new"}, STEP) == "Cut by new."


def test_an_explored_round_says_that_its_length_was_no_decision_of_the_budget() -> None:
    said = why({**ROUND, "cut_by": "none", "explored": True}, STEP)
    assert said.startswith("Verified beyond its budget")


def test_a_decision_carries_its_rank_step_and_reason() -> None:
    (decision,) = decisions("target-1", STEP)
    assert decision["rank"] == "target-1" and decision["step"] == 7
    assert decision["why"].startswith("Token 3") and decision["survivals"] == ROUND["survivals"]


def member(name: str, role: str, state: str = "ready", reason: str = "") -> dict[str, Any]:
    return {"name": name, "role": role, "state": state, "reason": reason, "num_restarts": 0}


def stats(**values: Any) -> dict[str, Any]:
    return {
        **rank(num_running=1),
        "num_committed": 5,
        "num_steps": 3,
        "num_late": 0,
        "num_unasked": 0,
        "acceptance_length": 1.5,
        "step_time_s": 0.1,
        "is_idle": False,
        "clock": {"last_predicted_s": None},
        "acceptance": {},
        "calibration": {},
        "curve": None,
        "last_step": STEP,
        **values,
    }


def test_a_rank_that_is_away_or_silent_says_so_instead_of_a_load() -> None:
    seen = Observation(
        members=(
            member("target-0", "target"),
            member("target-1", "target", "dead", "its process ended"),
            member("target-2", "target", "starting", "loading"),
            member("drafter-0", "drafter"),
        ),
        stats={"target-0": stats(), "target-1": stats(last_step=None)},
        at_s=1.0,
    )
    shown = state(seen, "m")
    assert [r["load"] for r in shown["ranks"]] == ["busy", "unknown", "unknown"]
    assert [r["why"] for r in shown["ranks"]][1:] == ["dead: its process ended", "loading"]
    assert [d["rank"] for d in shown["decisions"]] == ["target-0"]
    assert shown["ranks"][1]["step"] is None
    assert [other["name"] for other in shown["others"]] == ["drafter-0"]


def test_a_budget_without_a_bound_is_no_number() -> None:
    seen = Observation(
        members=(member("target-0", "target"),),
        stats={"target-0": stats(last_step={**STEP, "max_draft_tokens": UNLIMITED})},
        at_s=1.0,
    )
    assert state(seen, "m")["ranks"][0]["step"]["max_draft_tokens"] is None


def test_before_the_first_look_nothing_is_known() -> None:
    shown = state(Observation(), "m")
    assert shown["at_s"] is None and shown["ranks"] == shown["streams"] == []
