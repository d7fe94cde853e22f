"""Measured curves: staircases are kept, identities are checked, bad curves are refused, served steps correct them."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.messages import Endpoint, RankProfile
from actors.core.sps import CostCurve, CurveError, CurveIdentityError, RankTimes, ServedTimes

STAIRS = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def profile(
    step_time_s: list[float],
    tokens: list[int] | None = None,
    requests: list[int] | None = None,
    draft_time_s: list[float] | None = None,
    identity: str = "here",
) -> RankProfile:
    num = len(step_time_s)
    points = tokens or list(range(1, num + 1))
    return RankProfile(
        Endpoint("rank", "target", "", "", "1"),
        identity,
        np.array(points, np.int32),
        np.array(requests or [1] * len(points), np.int32),
        np.array(step_time_s, np.float64),
        np.array(draft_time_s or [0.0] * num, np.float64),
        4,
    )


def test_measured_points_are_returned_and_lines_join_them() -> None:
    curve = CostCurve.of(profile([1.0, 3.0, 4.0], [2, 4, 8]))
    assert curve.verify_time_s([2, 3, 4, 6, 8]).tolist() == [1.0, 2.0, 3.0, 3.5, 4.0]


def test_a_staircase_stays_a_staircase() -> None:
    curve = CostCurve.of(profile(STAIRS))
    assert curve.verify_time_s(np.arange(1, 7)).tolist() == STAIRS


def test_below_the_first_point_the_first_time_holds() -> None:
    assert CostCurve.of(profile([1.0, 2.0], [8, 16])).verify_time_s(1) == 1.0


def test_beyond_the_last_point_the_last_segment_goes_on() -> None:
    curve = CostCurve.of(profile([1.0, 1.5, 3.5], [10, 20, 30]))
    assert curve.verify_time_s([40, 50]).tolist() == [5.5, 7.5]


def test_a_curve_that_ends_on_a_tread_does_not_promise_free_tokens() -> None:
    curve = CostCurve.of(profile(STAIRS))
    assert curve.verify_time_s(11) == pytest.approx(2.0 + 5 * (1.0 / 5))


def test_a_dip_is_lifted_so_that_noise_never_makes_more_tokens_cheaper() -> None:
    curve = CostCurve.of(profile([1.0, 2.0, 1.7, 2.5]))
    assert curve.verify_time_s([1, 2, 3, 4]).tolist() == [1.0, 2.0, 2.0, 2.5]


def test_repeated_points_count_with_their_median() -> None:
    curve = CostCurve.of(profile([1.0, 9.0, 1.2, 3.0], [4, 4, 4, 8]))
    assert curve.verify_time_s(4) == 1.2


def test_drafting_is_part_of_a_round_and_grows_with_requests() -> None:
    curve = CostCurve.of(profile([1.0, 2.0], [4, 8], [1, 2], [0.1, 0.3]))
    assert float(curve.step_time_s_at(1, 4)) == pytest.approx(1.1)
    assert float(curve.step_time_s_at(2, 8)) == pytest.approx(2.3)
    assert float(curve.step_time_s_at(4, 8)) == pytest.approx(2.6)


def test_another_identity_is_refused_by_name() -> None:
    with pytest.raises(CurveIdentityError, match=r"'there'.*'here'.*profile it again"):
        CostCurve.of(profile([1.0, 2.0], identity="there"), "here")
    assert CostCurve.of(profile([1.0, 2.0]), "here").identity == "here"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (profile([]), "no points"),
        (profile([1.0, 2.0], [1]), "lengths .* differ"),
        (profile([1.0, 0.0]), "step_time_s: 0.0"),
        (profile([1.0, -2.0]), "step_time_s: -2.0"),
        (profile([1.0, np.nan]), "step_time_s: nan"),
        (profile([1.0, np.inf]), "step_time_s: inf"),
        (profile([1.0, 2.0], [0, 1]), "batch_tokens: 0"),
        (profile([1.0, 2.0], requests=[1, 0]), "num_requests: 0"),
        (profile([1.0, 2.0], draft_time_s=[0.1, -1.0]), "draft_time_s: -1.0"),
    ],
)
def test_curves_that_cannot_be_used_are_refused(bad: RankProfile, says: str) -> None:
    with pytest.raises(CurveError, match=says):
        CostCurve.of(bad)


def test_a_flat_curve_is_marked() -> None:
    assert CostCurve.of(profile([1.0, 1.01, 1.005])).is_flat
    assert CostCurve.of(profile([1.0])).is_flat
    assert not CostCurve.of(profile([1.0, 1.5])).is_flat


# --- served steps ----------------------------------------------------------------------------------------------------


def test_the_correction_settles_on_the_median_ratio_and_shrugs_off_stalls() -> None:
    served, rng = ServedTimes(), np.random.default_rng(0)
    for _ in range(600):
        stall = 50.0 if rng.random() < 0.1 else 1.0
        served.fold(20, 1.0, 1.4 * rng.lognormal(0, 0.05) * stall)
    assert float(served.ratio(20)) == pytest.approx(1.4, rel=0.08)


def test_regions_are_corrected_apart_and_joined_smoothly() -> None:
    served = ServedTimes()
    for _ in range(300):
        served.fold(4, 1.0, 1.0)
        served.fold(100, 1.0, 1.5)
    assert float(served.ratio(5)) == pytest.approx(1.0, rel=0.1)
    assert float(served.ratio(90)) == pytest.approx(1.5, rel=0.1)
    between = served.ratio(np.arange(5, 90))
    assert (np.diff(between) >= 0).all() and np.diff(between).max() < 0.05


def test_a_few_steps_correct_nothing() -> None:
    served = ServedTimes()
    for _ in range(7):
        served.fold(4, 1.0, 3.0)
    assert served.ratio([4, 100]).tolist() == [1.0, 1.0]


def test_times_that_are_not_positive_are_ignored() -> None:
    served = ServedTimes()
    for tokens, predicted, time in ((0, 1.0, 1.0), (4, 0.0, 1.0), (4, 1.0, 0.0)):
        served.fold(tokens, predicted, time)
    assert served.num_steps.sum() == 0


def test_a_machine_that_is_slower_throughout_keeps_its_curve_but_another_shape_does_not() -> None:
    times = RankTimes()
    assert times.doubt == "cold"
    times.measured(CostCurve.of(profile([1.0, 1.0, 4.0], [1, 16, 128])))
    for _ in range(400):
        times.fold(2, 8, 0, 5.0)
        times.fold(2, 120, 0, 5.0 * float(times.curve.step_time_s_at(2, 120)))  # type: ignore[union-attr]
    assert times.doubt == ""
    assert float(times.step_time_s_at(2, 8)) == pytest.approx(5.0, rel=0.1)
    for _ in range(400):
        times.fold(2, 120, 0, 200.0)
    assert times.doubt == "curve_mistrusted"
    times.measured(CostCurve.of(profile([1.0, 2.0])))
    assert times.doubt == "" and float(times.served.ratio(8)) == 1.0


def test_steps_with_prefill_do_not_correct_the_curve() -> None:
    times = RankTimes()
    times.measured(CostCurve.of(profile(STAIRS)))
    for _ in range(50):
        times.fold(2, 4, 3, 9.0)
        times.fold(0, 4, 0, 9.0)
    assert times.served.num_steps.sum() == 0


def test_a_flat_curve_is_doubted() -> None:
    times = RankTimes()
    times.measured(CostCurve.of(profile([1.0, 1.0])))
    assert times.doubt == "flat_curve"
