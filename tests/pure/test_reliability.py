"""Forecast survivals against what came of them: only verified slots count, and the two sums share their slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.calibration import ece
from actors.core.reliability import NUM_BINS, Reliability

GAMMA = 4
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.floats(0, 1, width=32), min_size=GAMMA, max_size=GAMMA),
        st.integers(0, GAMMA),
        st.integers(0, GAMMA),
    ),
    max_size=12,
)
Round = tuple[list[float], int, int]


def of(rounds: list[Round]) -> Reliability:
    survivals = np.array([r[0] for r in rounds], np.float32).reshape(-1, GAMMA)
    verify_len = np.array([r[1] for r in rounds], np.int32)
    accepted = np.array([min(r[1], r[2]) for r in rounds], np.int32)
    return Reliability.of_step(survivals, verify_len, accepted)


@given(ROUNDS, ROUNDS)
def test_sums_are_those_of_the_verified_slots(first: list[Round], second: list[Round]) -> None:
    total = of(first)
    total.add(of(second))
    for k in range(GAMMA):
        verified = [r for r in first + second if r[1] > k]
        assert total.num[k].sum() == len(verified)
        assert total.accepted[k].sum() == sum(min(r[1], r[2]) > k for r in verified)
        expected = sum(np.float32(r[0][k]) for r in verified)
        assert total.expected_by_position[k] == pytest.approx(expected, abs=1e-5)
    assert (total.accepted <= total.num).all()


@given(ROUNDS)
def test_the_error_is_the_one_calibration_knows(rounds: list[Round]) -> None:
    slots = [
        (np.float32(survivals[k]), min(verify_len, accepted) > k)
        for survivals, verify_len, accepted in rounds
        for k in range(verify_len)
    ]
    found = of(rounds).ece
    if not slots:
        assert found is None
        return
    forecast, happened = (np.array(column) for column in zip(*slots, strict=True))
    assert found == pytest.approx(ece(forecast.astype(np.float64), happened, NUM_BINS), abs=1e-6)


def test_a_trimmed_slot_says_nothing() -> None:
    kept = Reliability.of_step(np.array([[0.9, 0.1]]), np.array([1]), np.array([1]))
    assert kept.num.sum() == 1 and kept.expected_by_position.tolist() == [0.9, 0.0]
