"""Prefix survivals of calibrated confidences."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.survival import expected_committed, survivals


def test_survival_is_the_product_of_the_confidences_up_to_a_slot() -> None:
    out = survivals(np.array([[0.5, 0.5, 0.2], [1.0, 1.0, 0.9]], np.float32))
    np.testing.assert_allclose(out, [[0.5, 0.25, 0.05], [1.0, 1.0, 0.9]], rtol=1e-6)
    assert out.dtype == np.float32


def test_a_row_without_a_proposal_survives_nowhere() -> None:
    out = survivals(np.full((2, 3), 0.9, np.float32), np.array([True, False]))
    assert out[0].all() and not out[1].any()


def test_survivals_never_increase_along_a_row_and_stay_in_range() -> None:
    wild = np.random.default_rng(0).normal(0.7, 0.6, (500, 7)).astype(np.float32)
    out = survivals(wild)
    assert (np.diff(out, axis=1) <= 0).all()
    assert out.min() >= 0 and out.max() <= 1


def test_a_confidence_that_is_no_number_ends_the_row() -> None:
    out = survivals(np.array([[0.9, np.nan, 0.9]], np.float32))
    assert out[0].tolist() == [pytest.approx(0.9), 0.0, 0.0]


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    confidences = np.random.default_rng(1).random((9, 5)).astype(np.float32)
    for row, whole in enumerate(survivals(confidences)):
        assert (survivals(confidences[row : row + 1])[0] == whole).all()


def test_expected_tokens_count_the_targets_own() -> None:
    assert expected_committed(np.array([[0.5, 0.25], [0.0, 0.0]], np.float32)) == pytest.approx(
        2.75
    )
