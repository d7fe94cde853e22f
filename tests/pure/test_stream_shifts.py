"""What a running stream is off by beyond the others: learned from its own rounds, and only from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from actors.core import stream_shifts
from actors.core.evidence import to_probability
from actors.core.stream_shifts import OWN_SPREAD, StreamShifts


def keys(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def one(value: float) -> npt.NDArray[np.float64]:
    return np.array([value])


def test_a_stream_learns_from_its_own_rounds_alone() -> None:
    shifts = StreamShifts()
    assert shifts.of(keys(3, 4)).tolist() == [0.0, 0.0]
    shifts.learn(keys(9, 3), np.array([2.0, -1.0]), np.array([4.0, 4.0]))
    shifts.learn(keys(9), one(1.0), one(2.0))
    prior = OWN_SPREAD**-2
    expected = 2.0 / (4.0 + prior) + 1.0 / (6.0 + prior)
    assert shifts.of(keys(3, 4, 9)) == pytest.approx([-1.0 / (4.0 + prior), 0.0, expected])


def test_rounds_of_one_stream_in_one_step_count_together() -> None:
    together, apart = StreamShifts(), StreamShifts()
    together.learn(keys(1, 2, 1), np.array([1.0, 5.0, 2.0]), np.array([3.0, 1.0, 4.0]))
    apart.learn(keys(1), one(3.0), one(7.0))
    assert together.of(keys(1)) == pytest.approx(apart.of(keys(1)))


@pytest.mark.parametrize("off", [0.6, -0.6])
def test_a_stream_that_differs_is_followed_within_its_life(off: float) -> None:
    rng = np.random.default_rng(1)
    shifts, streams = StreamShifts(), np.arange(40, dtype=np.uint64)
    for _ in range(240):
        z = rng.normal(0, 1, 40)
        happened = rng.random(40) < to_probability(z + off)
        p = to_probability(z + shifts.of(streams))
        shifts.learn(streams, happened - p, p * (1 - p))
    assert shifts.of(streams).mean() == pytest.approx(off, abs=0.4 * abs(off))
    assert abs(shifts.of(streams).mean()) < abs(off)  # drawn to the others


def test_what_the_others_take_over_is_not_counted_twice() -> None:
    shifts = StreamShifts()
    shifts.learn(keys(1), one(5.0), one(1000.0))
    shifts.learn(keys(2), one(0.0), one(1e-9))
    before = shifts.of(keys(1, 2))
    shifts.others_moved(0.3)
    moved = shifts.of(keys(1, 2)) - before
    assert moved == pytest.approx([-0.3, 0.0], abs=0.01)


def test_streams_heard_of_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_shifts, "MAX_STREAMS", 4)
    shifts = StreamShifts()
    for key in (10, 30, 20, 40, 50):
        shifts.learn(keys(key), one(1.0), one(1.0))
    shifts.learn(keys(30, 60), np.ones(2), np.ones(2))
    known = shifts.of(keys(10, 20, 30, 40, 50, 60)) > 0
    assert known.tolist() == [False, True, True, True, True, True]
    shifts.learn(keys(70), one(1.0), one(1.0))
    assert not shifts.of(keys(20)).any()
