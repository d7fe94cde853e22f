"""Sequential calibration by monotone curves: recovers known maps, keeps order, lowers the calibration error."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.calibration import (
    CalibrationError,
    ConfidenceMap,
    area_under_curve,
    brier,
    ece,
    ece_floor,
    ece_floor_of_groups,
    fit,
    survival_error,
)


def rounds(
    true_temperatures: list[float], num: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits, and runs accepted as if the logits over the true temperatures were right."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (num, len(true_temperatures)))
    happens = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / true_temperatures))
    return logits, np.cumprod(happens, axis=1).sum(axis=1)


def test_known_temperatures_are_recovered_from_left_to_right() -> None:
    logits, accepted = rounds([2.5, 1.6, 1.0], 30_000)
    found = fit(logits, accepted, num_knots=0)
    np.testing.assert_allclose(found.map.temperatures, [2.5, 1.6, 1.0], rtol=0.13)
    np.testing.assert_allclose(found.map.shifts, 0.0, atol=0.15)
    assert (found.ece_after < 0.012).all()
    assert (found.ece_after[:2] < 0.5 * found.ece_before[:2]).all()


def test_a_head_that_is_too_sure_is_shifted_back() -> None:
    """Temperatures cannot move a mean: without the shift the error of the first position stays near 0.15."""
    logits, accepted = rounds([1.0, 1.0], 20_000)
    found = fit(logits + 0.8, accepted, num_knots=0)
    np.testing.assert_allclose(found.map.shifts, -0.8, atol=0.12)
    assert found.ece_before[0] > 0.05
    assert (found.ece_after < 0.012).all()


def test_the_mean_survival_is_right_at_every_position() -> None:
    logits, accepted = rounds([0.7, 3.0, 1.0], 3_000, seed=3)
    survival = fit(logits - 1.0, accepted).map.apply(logits - 1.0).astype(np.float64).cumprod(1)
    happened = (accepted[:, None] > np.arange(3)).mean(0)
    np.testing.assert_allclose(survival.mean(0), happened, atol=1e-4)


def test_a_head_that_no_straight_line_mends_is_bent() -> None:
    """Too timid in the middle, too sure at both ends: what a temperature leaves, a curve takes away."""
    rng = np.random.default_rng(4)
    truth = rng.normal(0.0, 1.5, (40_000, 2))
    told = np.where(
        truth > 0.5, 0.5 + 3 * (truth - 0.5), truth
    )  # another scale beyond a logit of 0.5
    accepted = np.cumprod(rng.random(truth.shape) < 1 / (1 + np.exp(-truth)), axis=1).sum(axis=1)
    line, curve = fit(told, accepted, num_knots=0), fit(told, accepted)
    assert line.ece_after[0] > 0.02
    assert (curve.ece_after < 0.011).all()
    assert not line.map.bends.size


def test_few_labels_bend_nothing_much() -> None:
    logits, accepted = rounds([1.0, 1.0], 40, seed=2)
    assert np.abs(fit(logits, accepted).map.bends).max() < 0.5


def test_curves_that_labels_turn_round_are_fitted_without_falling() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (5_000, 1))
    accepted = (rng.random(5_000) < 1 / (1 + np.exp(np.abs(logits[:, 0])))).astype(int)
    found = fit(logits, accepted).map
    along = found.apply(np.linspace(-8, 8, 400)[:, None])
    assert (np.diff(along[:, 0]) >= 0).all()


@pytest.mark.parametrize("num", [0, 40])
def test_a_position_that_never_or_always_survives_is_fitted_too(num: int) -> None:
    logits = np.random.default_rng(0).normal(size=(40, 2))
    found = fit(logits, np.full(40, 2 if num else 0))
    survival = found.map.apply(logits).cumprod(1)
    np.testing.assert_allclose(survival, num / 40, atol=1e-3)


def test_scaling_keeps_the_order_at_each_position() -> None:
    logits = np.sort(np.random.default_rng(1).normal(0, 3, (200, 2)), axis=0)
    scaled = ConfidenceMap.straight(np.array([1.0, -2.0]), np.array([0.3, 4.0])).apply(logits)
    assert (np.diff(scaled, axis=0) >= 0).all()
    assert scaled.dtype == np.float32


def test_identity_temperatures_are_a_sigmoid_at_any_size_of_logit() -> None:
    out = ConfidenceMap.identity(3).apply(np.array([[0.0, -800.0, 800.0]]))
    assert out.tolist() == [[0.5, 0.0, 1.0]]


def test_rounds_that_were_rejected_earlier_count_at_later_positions() -> None:
    """Leaving them out would estimate the conditional rate: here 1.0 instead of a survival of one half."""
    logits = np.full((400, 2), 30.0)
    logits[:, 0] = 0.0
    accepted = np.array([0, 2] * 200)
    assert fit(logits, accepted).ece_after[1] == pytest.approx(0.0, abs=1e-5)


def test_ece_is_the_weighted_gap_between_prediction_and_outcome() -> None:
    predicted = np.array([0.05, 0.05, 0.95, 1.0])
    happened = np.array([False, True, True, False])
    assert ece(predicted, happened, num_bins=10) == pytest.approx((0.9 + 0.95) / 4)


@pytest.mark.parametrize(
    ("logits", "accepted", "says"),
    [
        (np.zeros((0, 2)), np.zeros(0, int), "N > 0"),
        (np.zeros(4), np.zeros(4, int), "want \\[N, gamma\\]"),
        (np.zeros((4, 2)), np.zeros(3, int), "one per round"),
        (np.full((4, 2), np.nan), np.zeros(4, int), "not finite"),
        (np.zeros((4, 2)), np.array([0, 1, 2, 3]), "want 0..2"),
    ],
)
def test_data_that_cannot_be_fitted_is_refused(
    logits: np.ndarray, accepted: np.ndarray, says: str
) -> None:
    with pytest.raises(CalibrationError, match=says):
        fit(logits, accepted)


@pytest.mark.parametrize("values", [[], [0.0, 1.0], [np.inf], [[1.0]]])
def test_unusable_temperatures_are_refused(values: list[float]) -> None:
    with pytest.raises(CalibrationError, match="temperatures"):
        ConfidenceMap.straight(np.zeros(np.shape(values)), np.array(values))


@pytest.mark.parametrize("values", [[0.0], [np.nan, 0.0]])
def test_unusable_shifts_are_refused(values: list[float]) -> None:
    with pytest.raises(CalibrationError, match="shifts"):
        ConfidenceMap.straight(np.array(values), np.ones(2))


BENT = {
    "knots": np.array([[0.0, 1.0]]),
    "bends": np.array([[0.5, -1.4]]),
}


def test_a_curve_bends_at_its_knots() -> None:
    curve = ConfidenceMap(np.array([0.2]), np.array([1.0]), **BENT)
    z = np.array([[-1.0], [0.0], [0.5], [1.0], [3.0]])
    lines = np.array([-0.8, 0.2, 0.2 + 0.75, 0.2 + 1.5, 0.2 + 1.5 + 2 * 0.1])
    np.testing.assert_allclose(curve.apply(z)[:, 0], 1 / (1 + np.exp(-lines)), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"knots": np.array([[0.0]])}, "want \\[gamma, K\\] both"),
        ({"knots": np.zeros((2, 2)), "bends": np.zeros((2, 2))}, "want \\[gamma, K\\] both"),
        ({"knots": np.array([[1.0, 0.0]])}, "do not fall"),
        ({"knots": np.array([[0.0, np.inf]])}, "do not fall"),
        ({"bends": np.array([[0.5, -1.6]])}, "a curve falls"),
        ({"bends": np.array([[np.nan, 0.0]])}, "a curve falls"),
    ],
)
def test_unusable_curves_are_refused(change: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        ConfidenceMap(np.zeros(1), np.ones(1), **{**BENT, **change})


def test_temperatures_of_another_block_length_are_refused() -> None:
    with pytest.raises(CalibrationError, match="another block length"):
        ConfidenceMap.identity(5).apply(np.zeros((2, 4)))


def test_the_floor_is_the_error_of_a_perfect_head_with_so_many_labels() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.random(2_000)
    floors = [ece_floor(predicted[:n], np.random.default_rng(1), 20) for n in (200, 2_000)]
    assert 2.5 < floors[0] / floors[1] < 4  # as one over the square root of the number
    seen = ece(predicted, rng.random(2_000) < predicted, 20)
    assert seen == pytest.approx(floors[1], rel=0.5)


def test_predictions_that_err_alike_in_a_group_show_more_noise() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(100), 40)
    for spread, at_least, at_most in ((0.0, 0.85, 1.15), (1.0, 1.2, 3.0)):
        errors, floors = [], []
        for _ in range(12):
            z = rng.normal(0, 1, 4_000)
            truth = 1 / (1 + np.exp(-(z + rng.normal(0, spread, 100)[groups])))
            happened = rng.random(4_000) < truth
            if spread:  # right on average over all groups there are
                predicted = 1 / (1 + np.exp(-z / np.sqrt(1 + 0.346 * spread**2)))
            else:
                predicted = truth
            errors.append(ece(predicted, happened, 10))
            floors.append(ece_floor_of_groups(predicted, happened, groups, 10))
        assert np.mean(floors) == pytest.approx(np.mean(errors), rel=0.25)
        alone = ece_floor(predicted, rng, 10)
        assert at_least < np.mean(floors) / alone < at_most


def test_area_under_the_curve_counts_pairs_in_the_right_order_and_ties_half() -> None:
    predicted = np.array([0.9, 0.4, 0.4, 0.1])
    happened = np.array([True, True, False, False])
    assert area_under_curve(predicted, happened) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert np.isnan(area_under_curve(predicted, np.zeros(4, bool)))


def test_brier_is_the_mean_squared_distance() -> None:
    assert brier(np.array([1.0, 0.5]), np.array([False, True])) == pytest.approx(0.625)


def test_the_survival_is_judged_not_the_single_confidence() -> None:
    confidences = np.full((100, 2), 0.5)
    accepted = np.array([0, 0, 1, 2] * 25)
    np.testing.assert_allclose(survival_error(confidences, accepted), 0.0, atol=1e-9)
