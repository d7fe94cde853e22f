"""When a unit is started or parked: by what a token takes, with patience, and never below the bound."""

from __future__ import annotations

import pytest

from actors.core.autoscale import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Autoscaler,
    ScaleDecision,
    ScaleLimits,
    StartPauses,
    UnitLoad,
)
from tests.pure.test_rollout import OLD, T1, Cluster

LIMITS = ScaleLimits(
    target_tpot_s=0.1, park_share=0.5, up_after_s=5, down_after_s=60, cooldown_s=30, min_units=1
)


def serving(
    number: int, tpot_s: float | None, fewer_s: float | None = 0.2, streams: int = 3
) -> UnitLoad:
    return UnitLoad((f"target-{number}",), "serving", streams, tpot_s, fewer_s)


def parked(number: int) -> UnitLoad:
    return UnitLoad((f"target-{number}",), "parked")


def after(scaler: Autoscaler, units: list[UnitLoad], start: float, end: float) -> ScaleDecision:
    """The decision at `end`, having looked every second since `start`."""
    now, decision = start, scaler.decide(units, start)
    while now < end:
        now += 1
        decision = scaler.decide(units, now)
    return decision


def test_a_parked_unit_starts_when_even_the_fastest_is_too_slow_for_a_while() -> None:
    scaler = Autoscaler(LIMITS)
    units = [serving(0, 0.15), parked(1), parked(2)]
    assert after(scaler, units, 0, 4).kind == "keep"
    decision = after(scaler, units, 5, 5)
    assert (decision.kind, decision.members) == ("start", ("target-1",))
    assert decision.why == "a token takes 150.0 ms, the target is 100.0 ms"


def test_a_queue_at_one_unit_starts_nothing_while_another_is_fast() -> None:
    units = [serving(0, 0.9, streams=50), serving(1, 0.02, streams=0), parked(2)]
    assert after(Autoscaler(LIMITS), units, 0, 100).kind == "keep"


def test_a_moment_of_relief_begins_the_wait_anew() -> None:
    scaler = Autoscaler(LIMITS)
    slow, fast = [serving(0, 0.15), parked(1)], [serving(0, 0.05), parked(1)]
    after(scaler, slow, 0, 4)
    scaler.decide(fast, 4.5)
    assert after(scaler, slow, 5, 9).kind == "keep"
    assert after(scaler, slow, 10, 10).kind == "start"


def test_the_emptiest_unit_is_parked_when_the_others_would_stay_fast_enough() -> None:
    scaler = Autoscaler(LIMITS)
    units = [serving(0, 0.01, 0.04, 3), serving(1, 0.01, 0.03, 1), serving(2, 0.01, 0.04, 1)]
    assert after(scaler, units, 0, 59).kind == "keep"
    decision = after(scaler, units, 60, 60)
    assert (decision.kind, decision.members) == ("park", ("target-2",))
    assert "with one fewer 40.0 ms" in decision.why


@pytest.mark.parametrize("fewer_s", [0.05, 0.2, None])
def test_nothing_is_parked_where_the_rest_would_come_near_the_target(fewer_s: float | None) -> None:
    units = [serving(0, 0.01, 0.02), serving(1, 0.01, fewer_s)]
    assert after(Autoscaler(LIMITS), units, 0, 200).kind == "keep"


def test_the_bound_holds_in_both_directions() -> None:
    assert after(Autoscaler(LIMITS), [serving(0, 0.01, 0.01)], 0, 200).kind == "keep"
    one = Autoscaler(ScaleLimits(0.1, 0.5, 5, 60, 30, min_units=2))
    decision = one.decide([serving(0, None), parked(1)], 0)
    assert (decision.kind, decision.members) == ("start", ("target-1",))
    full = after(Autoscaler(LIMITS), [serving(0, 0.3)], 0, 10)
    assert full.kind == "keep" and "no unit is parked" in full.why


def test_after_a_change_it_waits_until_the_streams_have_spread() -> None:
    scaler = Autoscaler(LIMITS)
    slow = [serving(0, 0.15), parked(1), parked(2)]
    assert after(scaler, slow, 0, 5).kind == "start"
    still = after(scaler, slow, 6, 34)
    assert still.kind == "keep" and "a moment ago" in still.why
    assert after(scaler, slow, 35, 35).kind == "start"


@pytest.mark.parametrize(
    ("units", "why"),
    [
        ([serving(0, 0.9), UnitLoad(("target-1",), "changing"), parked(2)], "starts, drains"),
        ([serving(0, 0.9), serving(1, None), parked(2)], "not known"),
        ([], "not known"),
    ],
)
def test_nothing_is_decided_on_half_a_picture(units: list[UnitLoad], why: str) -> None:
    decision = after(Autoscaler(LIMITS), units, 0, 100)
    assert decision.kind == "keep" and why in decision.why


def test_a_rank_is_parked_as_it_is_rolled_and_parked_ranks_hold_up_nobody() -> None:
    cluster = Cluster(T1)
    cluster.rollout.wanted = -OLD
    cluster.see("target-1", num_streams=2, num_used_blocks=4)
    cluster.tick(), cluster.tick(12)
    assert cluster.done[-1] == ("move", ("target-1",))
    cluster.see("target-1", num_streams=0)
    cluster.restart_of("target-1")
    assert cluster.assigned["target-1"] == -OLD
    cluster.tick(), cluster.tick()
    assert cluster.rollout.outcome == "done"


def test_a_parked_unit_takes_the_place_of_one_that_stays_away() -> None:
    away = UnitLoad(("target-0",), "changing")
    scaler = Autoscaler(LIMITS)
    assert after(scaler, [away, parked(1)], 0, 4).kind == "keep"
    assert scaler.decide([serving(0, 0.05), parked(1)], 4.5).kind == "keep", "it was back"
    assert after(scaler, [away, parked(1)], 5, 9).kind == "keep"
    decision = after(scaler, [away, parked(1)], 10, 10)
    assert (decision.kind, decision.members) == ("start", ("target-1",))


def test_a_parked_rank_starts_without_waiting_for_one_that_is_away() -> None:
    cluster = Cluster(T1)
    cluster.rollout.wanted = OLD
    cluster.see("target-1", revision=-OLD)
    cluster.see("target-0", is_up=False, why="its node is gone")
    cluster.restart_of("target-1")
    cluster.tick(), cluster.tick()
    assert cluster.rollout.outcome == "done"


def test_another_unit_starts_where_one_has_just_failed_to() -> None:
    failing = UnitLoad(("target-1",), "failing")
    decision = after(Autoscaler(LIMITS), [serving(0, 0.15), failing, parked(2)], 0, 5)
    assert (decision.kind, decision.members) == ("start", ("target-2",))
    alone = after(Autoscaler(LIMITS), [serving(0, 0.15), failing], 0, 5)
    assert alone.kind == "keep" and alone.why.endswith("target-1 failed to start")
    short = Autoscaler(ScaleLimits(0.1, 0.5, 5, 60, 30, min_units=2))
    assert after(short, [serving(0, 0.05), failing], 0, 50).kind == "keep"


def test_a_start_that_fails_waits_twice_as_long_each_time_until_it_succeeds() -> None:
    pauses, rank = StartPauses(), ("target-1", 1)
    assert not pauses.holds(rank, 0.0)
    assert [pauses.failed(rank, 0.0) for _ in range(3)] == [30.0, 60.0, 120.0]
    assert pauses.holds(rank, 119.9) and not pauses.holds(rank, 120.0)
    assert not pauses.holds(("target-1", 2), 0.0), "other settings may load"
    for _ in range(2000):
        assert pauses.failed(rank, 0.0) <= LONGEST_PAUSE_S
    pauses.succeeded(rank)
    assert not pauses.holds(rank, 0.0) and pauses.failed(rank, 0.0) == FIRST_PAUSE_S
