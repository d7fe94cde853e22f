"""What a rank shows of itself agrees with what it did."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.core.messages import Endpoint, RankProfile, StepReport
from actors.core.rank_report import rank_stats
from actors.core.rank_view import MAX_ROWS, rank_view
from actors.core.sps import CostCurve, RankTimes
from actors.core.step_clock import StepClock
from tests.pure.rank_harness import Session, admitted, make_rank

NONE = np.zeros(3, np.int64)
REPORT = StepReport(
    rank=Endpoint("r", "target", "", "", "e"),
    step=1,
    step_time_s=0.03,
    draft_wait_s=0.01,
    num_requests=2,
    num_prefill_tokens=0,
    batch_tokens=4,
    context_tokens=9,
    survivals=np.zeros((2, 3), np.float32),
    num_proposed=NONE,
    num_scheduled=NONE,
    num_accepted=NONE,
    num_committed=2,
    num_free_blocks=1,
    num_blocks=2,
    num_waiting=0,
    budget_rule="lagged",
    budget_used=2,
)


def measured() -> RankTimes:
    times = RankTimes()
    tokens = np.array([2, 4, 8], np.int32)
    profile = RankProfile(REPORT.rank, "id", tokens, tokens, tokens * 0.005, np.zeros(3), gamma=3)
    times.measured(CostCurve.of(profile))
    return times


def test_a_step_is_compared_with_what_the_curve_foretold_for_its_tokens() -> None:
    clock = StepClock()
    clock.note(REPORT, measured())
    clock.note(replace(REPORT, batch_tokens=8, step_time_s=0.05), measured())
    assert (clock.num_compared, clock.step_s, clock.draft_wait_s) == (2, 0.08, 0.02)
    assert clock.predicted_s == pytest.approx(0.02 + 0.04) and clock.compared_s == 0.08
    assert clock.last_predicted_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    "report", [replace(REPORT, num_prefill_tokens=2), replace(REPORT, num_requests=0)]
)
def test_a_step_the_curve_knows_nothing_of_is_not_compared(report: StepReport) -> None:
    clock = StepClock()
    clock.note(report, measured())
    clock.note(REPORT, RankTimes())
    assert clock.num_compared == 0 and clock.last_predicted_s is None
    assert clock.step_s == 0.06


def view(session: Any, times: RankTimes) -> dict[str, Any]:
    rank = session.rank
    shown = rank_view(rank.counters, StepClock(), times, rank.landed)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    return shown


def test_the_last_step_shows_its_rounds_and_what_cut_them() -> None:
    session = Session(make_rank(max_running=32, max_waiting=32, max_batch_tokens=128))
    assert view(session, RankTimes())["last_step"] is None
    for i in range(MAX_ROWS + 2):
        session.submit(admitted(f"r{i}", [1, 2, 3], 40))
    while session.rank.counters.num_steps < 4:
        session.step()
    shown = view(session, measured())
    acceptance, step = shown["acceptance"], shown["last_step"]
    counted = session.rank.counters.acceptance
    assert acceptance["scheduled"] == counted.scheduled.tolist()
    assert sum(acceptance["scheduled"]) > 0
    assert step["num_requests"] > len(step["rounds"]) == MAX_ROWS
    assert step["batch_tokens"] == step["num_requests"] + step["num_scheduled"]
    for shown_round in step["rounds"]:
        assert shown_round["num_accepted"] <= shown_round["num_scheduled"]
        assert shown_round["cut_by"]
    assert shown["curve"]["corrected_s"] == shown["curve"]["measured_s"] == [0.01, 0.02, 0.04]
    assert view(session, RankTimes())["curve"] is None
    stats = rank_stats(session.rank)
    assert stats["num_running"] == MAX_ROWS + 2 and stats["acceptance_length"] >= 1
