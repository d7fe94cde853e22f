"""Shifts by the age of a stream: learned by span, fading, drawn to 0."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.age_shifts import AGE_SPREAD, MEMORY_ROUNDS, AgeShifts


def test_each_span_of_ages_learns_from_its_own_rounds() -> None:
    shifts = AgeShifts()
    ages = np.array([0.0, 3.0, 4.0, 500.0])
    assert not shifts.of(ages).any()
    shifts.learn(ages, np.array([1.0, 1.0, 2.0, -4.0]), np.array([2.0, 1.0, 1.0, 8.0]))
    prior = AGE_SPREAD**-2
    expected = [2 / (3 + prior), 2 / (3 + prior), 2 / (1 + prior), 0.0, -4 / (8 + prior)]
    assert shifts.of(np.array([0.0, 3.0, 15.0, 16.0, 1e6])) == pytest.approx(expected)


def test_what_all_ages_share_is_left_to_others() -> None:
    shifts, information = AgeShifts(), np.array([2.0, 1.0, 5.0])
    shifts.learn(np.array([0.0, 9.0, 70.0]), 0.7 * information, information)
    assert shifts.of(np.array([0.0, 9.0, 70.0])) == pytest.approx([0.0] * 3, abs=1e-9)


def test_what_is_long_past_counts_for_little() -> None:
    shifts, count = AgeShifts(), int(MEMORY_ROUNDS)
    ages, every = np.repeat([0.0, 100.0], count // 2), np.full(count, 0.25)
    shifts.learn(ages, np.repeat([0.1, -0.1], count // 2), every)
    before = shifts.of(np.zeros(1))[0]
    assert before > 0.3
    for _ in range(8):
        shifts.learn(np.full(count, 100.0), np.zeros(count), every)
    shifts.learn(np.array([0.0, 100.0]), np.array([-1.0, 1.0]), np.array([1.0, 1.0]))
    assert shifts.of(np.zeros(1))[0] < before - 0.15
