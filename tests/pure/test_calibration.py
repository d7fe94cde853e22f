"""Sequential temperature scaling: recovers known temperatures, keeps order, lowers the calibration error."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.calibration import CalibrationError, Temperatures, ece, fit


def rounds(
    true_temperatures: list[float], num: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits, and runs accepted as if the logits over the true temperatures were right."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (num, len(true_temperatures)))
    happens = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / true_temperatures))
    return logits, np.cumprod(happens, axis=1).sum(axis=1)


def test_known_temperatures_are_recovered_from_left_to_right() -> None:
    logits, accepted = rounds([2.5, 1.6, 1.0], 60_000)
    found = fit(logits, accepted)
    np.testing.assert_allclose(found.temperatures.values, [2.5, 1.6, 1.0], rtol=0.2)
    assert (found.ece_after < 0.012).all()
    assert (found.ece_after[:2] < 0.5 * found.ece_before[:2]).all()


def test_fitting_never_makes_the_first_position_worse() -> None:
    for seed in range(5):
        logits, accepted = rounds([1.0, 1.0], 500, seed)
        found = fit(logits, accepted)
        assert found.ece_after[0] <= found.ece_before[0]


def test_scaling_keeps_the_order_at_each_position() -> None:
    logits = np.sort(np.random.default_rng(1).normal(0, 3, (200, 2)), axis=0)
    scaled = Temperatures(np.array([0.3, 4.0])).apply(logits)
    assert (np.diff(scaled, axis=0) >= 0).all()
    assert scaled.dtype == np.float32


def test_identity_temperatures_are_a_sigmoid_at_any_size_of_logit() -> None:
    out = Temperatures.identity(3).apply(np.array([[0.0, -800.0, 800.0]]))
    assert out.tolist() == [[0.5, 0.0, 1.0]]


def test_rounds_that_were_rejected_earlier_count_at_later_positions() -> None:
    """Leaving them out would estimate the conditional rate: here 1.0 instead of a survival of one half."""
    logits = np.full((400, 2), 30.0)
    logits[:, 0] = 0.0
    accepted = np.array([0, 2] * 200)
    assert fit(logits, accepted).ece_after[1] == pytest.approx(0.0, abs=1e-6)


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
        Temperatures(np.array(values))


def test_temperatures_of_another_block_length_are_refused() -> None:
    with pytest.raises(CalibrationError, match="another block length"):
        Temperatures.identity(5).apply(np.zeros((2, 4)))
