"""Confidences stay true while serving: shifts from censored rounds, the drift alarm, the reliability report."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.calibration import ece
from actors.core.online_calibration import (
    CHECK_ROUNDS,
    FULL_SHARE,
    WHOLE_ROUNDS,
    OnlineCalibration,
)

GAMMA = 5
Float32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Traffic:
    """Blocks of a drafter whose confidence logits are off by `bias`, and what becomes of them."""

    def __init__(self, bias: float | npt.NDArray[np.float64], seed: int = 0) -> None:
        self.bias, self.rng = bias, np.random.default_rng(seed)

    def rounds(self, count: int) -> tuple[Float32, Ints]:
        """Confidences [count, gamma] and the tokens each block would have had accepted, uncensored."""
        truth = self.rng.normal(0.3, 1.2, (count, GAMMA))
        accepted = self.rng.random((count, GAMMA)) < 1 / (1 + np.exp(-truth))
        confidences = 1 / (1 + np.exp(-(truth + self.bias)))
        return confidences.astype(np.float32), accepted.cumprod(axis=1).sum(axis=1)


def serve(
    calibration: OnlineCalibration, traffic: Traffic, count: int, min_survival: float = 0.0
) -> list[bool]:
    """Serve `count` rounds one by one under a price; return when the alarm went off."""
    alarms = []
    for number in range(count):
        confidences, would = traffic.rounds(1)
        survival = calibration.adjust(confidences).cumprod(axis=1)
        verify_len = (survival >= min_survival).sum(axis=1)
        explored = np.array([number % round(1 / FULL_SHARE) == 0]) & (verify_len < GAMMA)
        verify_len[explored] = GAMMA
        accepted = np.minimum(would, verify_len)
        alarms.append(calibration.observe(confidences, verify_len, accepted, explored))
    return alarms


def errors(calibration: OnlineCalibration, traffic: Traffic) -> list[float]:
    """ECE of the survivals at each position on fresh rounds."""
    confidences, would = traffic.rounds(20_000)
    survival = calibration.adjust(confidences).cumprod(axis=1)
    return [ece(survival[:, k], would > k) for k in range(GAMMA)]


def test_nothing_is_changed_before_something_was_learned() -> None:
    calibration = OnlineCalibration(GAMMA)
    confidences, _ = Traffic(1.0).rounds(7)
    assert calibration.adjust(confidences) is confidences
    assert not calibration.observe(
        confidences[:0], np.zeros(0, int), np.zeros(0, int), np.zeros(0, bool)
    )
    report = calibration.reliability()
    assert report.num_whole == 0
    assert np.isnan(report.ece).all()


@pytest.mark.parametrize("min_survival", [0.0, 0.2, 0.5])
def test_shifts_are_right_however_much_the_budget_hides(min_survival: float) -> None:
    calibration, traffic = OnlineCalibration(GAMMA), Traffic(0.9)
    before = errors(calibration, traffic)
    serve(calibration, traffic, 1500, min_survival)
    assert max(before) > 0.1
    assert max(errors(calibration, traffic)) < 0.03
    assert calibration.shifts[0] == pytest.approx(-0.9, abs=0.25)


def test_positions_may_be_wrong_in_different_ways() -> None:
    traffic = Traffic(np.array([0.8, 0.4, 0.0, -0.4, -0.8]))
    calibration = OnlineCalibration(GAMMA)
    serve(calibration, traffic, 2000)
    assert calibration.shifts[0] < calibration.shifts[2] < calibration.shifts[4]
    assert max(errors(calibration, traffic)) < 0.04


@pytest.mark.parametrize("bias", [1.2, -1.2])
def test_after_a_change_of_traffic_the_alarm_fires_and_calibration_is_back_within_300_rounds(
    bias: float,
) -> None:
    left = []
    for seed in range(6):  # 300 rounds are few labels: what is promised holds in the mean
        calibration = OnlineCalibration(GAMMA)
        serve(calibration, Traffic(0.0, seed), 600, 0.1)
        assert calibration.num_alarms == 0
        changed = Traffic(bias, seed + 100)
        assert max(errors(calibration, changed)) > 0.1
        alarms = serve(calibration, changed, 300, 0.1)
        assert any(alarms)
        assert calibration.num_alarms == sum(alarms)
        left.append(max(errors(calibration, changed)))
    assert np.mean(left) < 0.03
    assert max(left) < 0.06


def test_steady_traffic_raises_no_alarm() -> None:
    alarms = sum(
        sum(serve(OnlineCalibration(GAMMA), Traffic(0.0, seed), 1200, 0.2)) for seed in range(4)
    )
    assert alarms == 0


def test_reliability_counts_an_explored_round_for_all_it_stands_for() -> None:
    calibration = OnlineCalibration(GAMMA)
    half = np.full((1, GAMMA), 0.5, np.float32)
    yes, no = np.array([True]), np.array([False])
    full, none = np.array([GAMMA]), np.array([0])
    calibration.observe(half, full, full, no)  # chosen by the budget, all accepted
    calibration.observe(half, full, none, yes)  # one of many, all refused
    calibration.observe(
        half, np.array([2]), np.array([2]), no
    )  # censored: says nothing about the rest
    report = calibration.reliability()
    assert (report.num_whole, report.num_explored) == (2, 1)
    assert report.predicted == pytest.approx(0.5 ** np.arange(1, GAMMA + 1))
    weight = 1 / FULL_SHARE
    assert report.happened == pytest.approx(1 / (1 + weight))
    assert report.ece == pytest.approx(np.abs(report.predicted - report.happened))


def test_only_the_newest_rounds_are_remembered_and_a_new_drafter_starts_afresh() -> None:
    calibration, traffic = OnlineCalibration(GAMMA), Traffic(0.0)
    confidences, would = traffic.rounds(WHOLE_ROUNDS + 100)
    everything = np.full(len(would), GAMMA)
    calibration.observe(confidences, everything, would, np.zeros(len(would), bool))
    assert calibration.reliability().num_whole == WHOLE_ROUNDS
    assert calibration.shifts.any()
    assert calibration.num_rounds == len(would)
    calibration.restart()
    assert not calibration.shifts.any()
    assert calibration.reliability().num_whole == 0


def test_certain_confidences_stay_finite() -> None:
    calibration = OnlineCalibration(GAMMA)
    sure = np.tile(np.array([1, 0, 1, 0, 1], np.float32), (CHECK_ROUNDS * 4, 1))
    lengths = np.full(len(sure), GAMMA)
    calibration.observe(sure, lengths, np.zeros(len(sure), int), np.zeros(len(sure), bool))
    assert np.isfinite(calibration.shifts).all()
    adjusted = calibration.adjust(sure)
    assert ((adjusted >= 0) & (adjusted <= 1)).all()
