"""How many ingress replicas serve: by what a token waits in the front, foretold for other numbers of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.ingress_scale import (
    FrontDecision,
    FrontLimits,
    FrontLoad,
    IngressScaler,
    foretold_lag_s,
)

LIMITS = FrontLimits(least=1, most=4, target_lag_s=0.02, up_after_s=5, down_after_s=60)
SLOW, IDLE = FrontLoad(0.9, 0.05, 40), FrontLoad(0.02, 0.0005, 3)


def after(scaler: IngressScaler, loads: list[FrontLoad], start: float, end: float) -> FrontDecision:
    """The decision at `end`, having looked every second since `start`."""
    now, decision = start, scaler.decide(loads, len(loads), start)
    while now < end:
        now += 1
        decision = scaler.decide(loads, len(loads), now)
    return decision


def test_the_wait_at_another_number_follows_from_the_work_shared_by_it() -> None:
    two = [FrontLoad(0.8, 0.04, 10), FrontLoad(0.8, 0.04, 10)]
    assert foretold_lag_s(two, 2) == pytest.approx(0.04)
    assert foretold_lag_s(two, 4) == pytest.approx(0.04 / 4 * (0.4 / 0.6))
    assert foretold_lag_s(two, 1) == float("inf"), "1.6 cores of work do not fit one loop"
    assert foretold_lag_s([FrontLoad(0.0, 0.0, 0)], 1) == 0.0


def test_a_replica_more_starts_when_a_token_waits_too_long_for_a_while() -> None:
    scaler = IngressScaler(LIMITS)
    assert after(scaler, [SLOW], 0, 4).num_replicas == 1
    decision = scaler.decide([SLOW], 1, 5)
    assert decision.num_replicas == 2, "0.9 shared by two loops: 4.5 ms"
    assert decision.why.startswith("a token waits 50.0 ms in the front, 20.0 ms are allowed")


def test_as_many_start_at_once_as_are_needed_and_never_more_than_may() -> None:
    full = [FrontLoad(0.95, 0.4, 50), FrontLoad(0.95, 0.4, 50)]
    assert after(IngressScaler(LIMITS), full, 0, 5).num_replicas == 4
    roomy = IngressScaler(replace(LIMITS, most=9))
    assert after(roomy, [FrontLoad(0.95, 0.9, 9)], 0, 5).num_replicas == 4
    at_most = after(IngressScaler(replace(LIMITS, most=1)), [SLOW], 0, 50)
    assert at_most.num_replicas == 1 and "as many replicas as may be" in at_most.why


def test_many_open_streams_start_nothing_while_their_tokens_do_not_wait() -> None:
    assert after(IngressScaler(LIMITS), [FrontLoad(0.6, 0.004, 900)], 0, 500).num_replicas == 1


def test_a_loop_that_is_late_but_not_busy_lacks_a_core_not_a_replica() -> None:
    decision = after(IngressScaler(LIMITS), [FrontLoad(0.2, 0.3, 9)], 0, 50)
    assert decision.num_replicas == 1 and decision.why.endswith("short of cores")


def test_what_holds_for_a_lack_of_cores_is_not_counted_against_replicas() -> None:
    """Neither towards one more, once the loop is busy too, nor towards one fewer, once its lateness is gone."""
    scaler = IngressScaler(LIMITS)
    after(scaler, [FrontLoad(0.2, 0.3, 9)], 0, 50)
    assert scaler.decide([SLOW], 1, 51).num_replicas == 1
    late = [FrontLoad(0.3, 0.03, 10), *[FrontLoad(0.01, 0.0, 0)] * 3]
    assert foretold_lag_s(late, 3) < LIMITS.spare_share * LIMITS.target_lag_s
    scaler = IngressScaler(LIMITS)
    after(scaler, late, 0, 100)
    assert scaler.decide([IDLE] * 4, 4, 101).num_replicas == 4


def test_a_moment_of_relief_begins_the_wait_anew() -> None:
    scaler = IngressScaler(LIMITS)
    after(scaler, [SLOW], 0, 4)
    scaler.decide([FrontLoad(0.5, 0.01, 9)], 1, 4.5)
    assert after(scaler, [SLOW], 5, 9).num_replicas == 1
    assert scaler.decide([SLOW], 1, 10).num_replicas == 2


def test_one_ends_when_the_others_would_do_for_long_and_the_bound_holds() -> None:
    scaler = IngressScaler(LIMITS)
    assert after(scaler, [IDLE, IDLE], 0, 59).num_replicas == 2
    decision = scaler.decide([IDLE, IDLE], 2, 60)
    assert decision.num_replicas == 1 and "with one fewer it would be" in decision.why
    assert after(scaler, [IDLE], 61, 500).num_replicas == 1
    both = IngressScaler(replace(LIMITS, least=2))
    assert after(both, [IDLE, IDLE], 0, 500).num_replicas == 2


def test_between_the_two_thresholds_nothing_changes() -> None:
    pair = [FrontLoad(0.42, 0.007, 20)] * 2
    assert LIMITS.spare_share * LIMITS.target_lag_s < foretold_lag_s(pair, 1)
    assert after(IngressScaler(LIMITS), pair, 0, 1000).num_replicas == 2


def test_nothing_is_decided_while_a_replica_starts_or_ends() -> None:
    scaler = IngressScaler(LIMITS)
    after(scaler, [SLOW], 0, 4)
    decision = scaler.decide([SLOW], 2, 5)
    assert decision == FrontDecision(2, "1 of 2 replicas are known of")
    assert after(scaler, [SLOW, SLOW], 6, 10).num_replicas == 2, "the wait begins anew"


def test_a_number_out_of_bounds_comes_back_into_them() -> None:
    assert IngressScaler(LIMITS).decide([IDLE] * 6, 6, 0).num_replicas == 4
    assert IngressScaler(replace(LIMITS, least=2)).decide([], 0, 0).num_replicas == 2


def test_without_streams_nobody_waits_however_late_a_loop_is() -> None:
    assert after(IngressScaler(LIMITS), [FrontLoad(0.9, 0.3, 0)], 0, 50).num_replicas == 1
