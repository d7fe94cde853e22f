"""Forecast survivals against what came of them: only verified slots count, explored ones for all they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.calibration import ece
from actors.core.reliability import Reliability

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
    return Reliability.of_rounds(survivals, verify_len, accepted)


@given(ROUNDS, ROUNDS)
def test_sums_are_those_of_the_verified_slots(first: list[Round], second: list[Round]) -> None:
    total = of(first)
    total.add(of(second))
    for k in range(GAMMA):
        verified = [r for r in first + second if r[1] > k]
        assert total.num[k].sum() == len(verified)
        assert total.accepted[k].sum() == sum(min(r[1], r[2]) > k for r in verified)
        expected = sum(np.float32(r[0][k]) for r in verified)
        assert total.expected[k].sum() == pytest.approx(expected, abs=1e-5)
    assert (total.accepted <= total.num).all()


@given(ROUNDS)
def test_the_error_of_a_position_is_the_one_calibration_knows(rounds: list[Round]) -> None:
    found = of(rounds).ece
    for k in range(GAMMA):
        slots = [(np.float32(r[0][k]), min(r[1], r[2]) > k) for r in rounds if r[1] > k]
        if not slots:
            assert np.isnan(found[k])
            continue
        forecast, happened = (np.array(column) for column in zip(*slots, strict=True))
        assert found[k] == pytest.approx(ece(forecast.astype(np.float64), happened), abs=1e-6)


def test_a_trimmed_slot_says_nothing() -> None:
    kept = Reliability.of_rounds(np.array([[0.9, 0.1]]), np.array([1]), np.array([1]))
    assert kept.num.sum(axis=1).tolist() == [1, 0]
    assert kept.expected.sum(axis=1) == pytest.approx([0.9, 0])


def test_what_a_budget_hides_is_seen_through_the_explored_rounds() -> None:
    """A budget that only sends slots it believes in: what it thinks of the others must still be judged."""
    rng = np.random.default_rng(0)
    survivals = rng.choice([0.2, 0.8], (40_000, 1))
    would = (rng.random(40_000) < np.where(survivals[:, 0] < 0.5, 0.5, 0.8)).astype(int)
    planned = (survivals[:, 0] > 0.5).astype(int)
    explored = rng.random(40_000) < 1 / 16
    verify_len = np.where(explored, 1, planned)
    accepted = np.minimum(would, verify_len)
    truth = ece(survivals[:, 0], would > 0)
    blind = Reliability.of_rounds(survivals, verify_len, accepted)
    seeing = Reliability.of_rounds(survivals, verify_len, accepted, planned, 1 / 16)
    assert truth == pytest.approx(0.15, abs=0.01)
    assert blind.ece[0] < 0.05
    assert seeing.ece[0] == pytest.approx(truth, abs=0.02)


def test_older_rounds_fade() -> None:
    total = of([([0.5] * GAMMA, GAMMA, GAMMA)])
    total.add(of([([0.5] * GAMMA, GAMMA, 0)]), keep=0.25)
    assert total.num.sum(axis=1) == pytest.approx([1.25] * GAMMA)
    assert total.accepted.sum(axis=1) == pytest.approx([0.25] * GAMMA)
