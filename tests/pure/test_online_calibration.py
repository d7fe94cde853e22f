"""Confidences stay true while serving: shifts from censored rounds, and the drift alarm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.calibration import ece
from actors.core.evidence import to_logits, to_probability
from actors.core.online_calibration import (
    DOUBTED_ROUNDS,
    LOOK_ROUNDS,
    MEMORY_ROUNDS,
    OnlineCalibration,
    Rounds,
)

GAMMA, BATCH = 5, 8
SHARE = 1 / 64
Float32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Traffic:
    """Blocks of a drafter whose confidence logits are off by `bias`, of streams that differ among themselves."""

    def __init__(
        self,
        bias: float | npt.NDArray[np.float64],
        seed: int = 0,
        spread: float = 0.0,
        num_streams: int = BATCH,
    ) -> None:
        self.bias, self.rng, self.spread = bias, np.random.default_rng(seed), spread
        self.offset = self.rng.normal(0, spread, num_streams)
        self.streams = np.arange(num_streams, dtype=np.uint64) + np.uint64(1000 * seed)

    def rounds(self, count: int = BATCH) -> tuple[Float32, Ints, npt.NDArray[np.uint64]]:
        """Confidences [count, gamma], tokens each block would have had accepted (uncensored), and whose it is."""
        which = np.arange(count) % len(self.streams)
        truth = self.rng.normal(0.3, 1.2, (count, GAMMA))
        chance = to_probability(truth + self.offset[which][:, None])
        accepted = self.rng.random((count, GAMMA)) < chance
        confidences = to_probability(truth + self.bias).astype(np.float32)
        keys = self.streams[which]
        for ended in np.flatnonzero(self.rng.random(len(self.streams)) < 1 / 40):
            self.offset[ended] = self.rng.normal(0, self.spread)
            self.streams[ended] += np.uint64(100_000)
        return confidences, accepted.cumprod(axis=1).sum(axis=1), keys


def adjusted(calibration: OnlineCalibration, confidences: Float32) -> npt.NDArray[np.float64]:
    return to_probability(to_logits(confidences) + calibration.shifts)


def serve(
    calibration: OnlineCalibration, traffic: Traffic, count: int, min_survival: float = 0.0
) -> list[int]:
    """Serve `count` rounds, `BATCH` a step, under a price; the rounds after which the alarm went off."""
    alarms = []
    for end in range(BATCH, count + 1, BATCH):
        confidences, would, streams = traffic.rounds()
        survival = adjusted(calibration, confidences).cumprod(axis=1)
        planned = (survival >= min_survival).sum(axis=1)
        explored = traffic.rng.random(BATCH) < SHARE
        verify_len = np.where(explored, GAMMA, planned)
        accepted = np.minimum(would, verify_len)
        if calibration.observe(Rounds(confidences, verify_len, accepted, planned, streams)):
            alarms.append(end)
    return alarms


def errors(calibration: OnlineCalibration, traffic: Traffic) -> list[float]:
    """ECE of the survivals at each position on fresh rounds."""
    confidences, would, _ = traffic.rounds(20_000)
    survival = adjusted(calibration, confidences).cumprod(axis=1)
    return [ece(survival[:, k], would > k) for k in range(GAMMA)]


def verified(count: int, num_accepted: int, confidence: float = 0.5) -> Rounds:
    """Rounds of one stream verified whole, all with the same outcome."""
    every = np.full(count, GAMMA)
    confidences = np.full((count, GAMMA), confidence, np.float32)
    return Rounds(
        confidences, every, np.full(count, num_accepted), every, np.zeros(count, np.uint64)
    )


def test_nothing_is_changed_before_something_was_learned() -> None:
    calibration = OnlineCalibration(GAMMA)
    assert not calibration.observe(verified(0, 0))
    assert not calibration.observe(verified(LOOK_ROUNDS - 1, 0))
    assert not calibration.shifts.any()
    assert np.isnan(OnlineCalibration(GAMMA).reliability.ece).all()


@pytest.mark.parametrize("min_survival", [0.0, 0.2, 0.5])
def test_shifts_are_right_however_much_the_budget_hides(min_survival: float) -> None:
    calibration, traffic = OnlineCalibration(GAMMA, SHARE), Traffic(0.9)
    before = errors(calibration, traffic)
    serve(calibration, traffic, 1500, min_survival)
    assert max(before) > 0.1
    assert max(errors(calibration, traffic)) < 0.04
    assert calibration.shifts[0] == pytest.approx(-0.9, abs=0.3)


def test_a_slot_that_was_not_seen_teaches_nothing() -> None:
    calibration = OnlineCalibration(GAMMA)
    rounds = verified(200, 0)
    rounds.verify_len[:] = 1
    for _ in range(4):
        calibration.observe(rounds)
    alike = calibration.shifts[1:]
    assert (alike == alike[0]).all()  # what all positions have in common, and no more
    assert calibration.shifts[0] < alike[0] < 0


def test_positions_may_be_wrong_in_different_ways() -> None:
    traffic = Traffic(np.array([0.8, 0.4, 0.0, -0.4, -0.8]))
    calibration = OnlineCalibration(GAMMA)
    before = max(errors(calibration, traffic))
    serve(calibration, traffic, 2000)
    assert calibration.shifts[0] < calibration.shifts[2] < calibration.shifts[4]
    assert max(errors(calibration, traffic)) < min(0.06, before / 2)


@pytest.mark.parametrize("bias", [1.2, -1.2])
def test_after_a_change_of_traffic_the_alarm_fires_and_calibration_is_back_within_300_rounds(
    bias: float,
) -> None:
    left = []
    for seed in range(10):  # 300 rounds are few labels: what is promised holds in the mean
        calibration = OnlineCalibration(GAMMA, SHARE)
        serve(calibration, Traffic(0.0, seed), 600, 0.1)
        assert calibration.num_alarms == 0
        changed = Traffic(bias, seed + 100)
        assert max(errors(calibration, changed)) > 0.1
        alarms = serve(calibration, changed, 300, 0.1)
        assert alarms and alarms[0] <= 150
        assert calibration.num_alarms == len(alarms)
        left.append(errors(calibration, changed))
    assert np.mean(left) < 0.03
    assert np.max(left) < 0.08


@pytest.mark.parametrize("spread", [0.0, 0.6])
def test_steady_traffic_raises_hardly_an_alarm_although_streams_differ(spread: float) -> None:
    alarms = sum(
        len(serve(OnlineCalibration(GAMMA, SHARE), Traffic(0.0, seed, spread, 16), 1500, 0.2))
        for seed in range(4)
    )
    assert alarms <= 1


def test_streams_that_differ_are_told_apart_and_the_forecast_of_all_stays_true() -> None:
    calibration, traffic = OnlineCalibration(GAMMA), Traffic(0.0, 3, 0.6)
    alone: list[float] = []
    told: list[float] = []
    for step in range(600):
        confidences, would, streams = traffic.rounds()
        every = np.full(BATCH, GAMMA)
        own = calibration.beyond(streams)
        if step >= 200:
            for shift, into in ((np.zeros(BATCH), alone), (own, told)):
                believed = to_probability(
                    to_logits(confidences) + calibration.shifts + shift[:, None]
                )
                into.extend(np.square(believed[:, 0] - (would > 0)))
        calibration.observe(Rounds(confidences, every, would, every, streams))
    assert np.mean(told) < 0.985 * np.mean(alone)
    assert max(calibration.reliability.ece) < 0.06


def test_rounds_of_streams_that_err_alike_count_for_fewer() -> None:
    """As many labels move the shifts less when they are of a few streams that differ."""
    found = []
    for spread in (0.0, 1.2):
        calibration = OnlineCalibration(GAMMA)
        serve(calibration, Traffic(0.3, 2, spread), 256)
        found.append(calibration._change.alike())
    assert found[0] < 2.0 < found[1]


def test_a_change_is_not_averaged_away_by_what_was_before() -> None:
    """After the alarm, all older evidence counts for a few rounds."""
    calibration = OnlineCalibration(GAMMA)
    for _ in range(50):
        calibration.observe(verified(16, GAMMA, 0.9))
    assert calibration.num_alarms == 0
    fired = [calibration.observe(verified(8, 0, 0.9)) for _ in range(16)]
    assert fired.count(True) == 1
    assert calibration._evidence.num_rounds < DOUBTED_ROUNDS + 16 * 8
    assert calibration.reliability.num[0].sum() < 16 * 8  # none from before the alarm


def test_switched_off_it_measures_and_changes_nothing() -> None:
    calibration = OnlineCalibration(GAMMA, learns=False)
    for _ in range(20):
        assert not calibration.observe(verified(32, 0, 0.9))
    assert not calibration.shifts.any()
    assert calibration.reliability.ece[0] == pytest.approx(0.9, abs=0.01)
    assert (calibration.num_rounds, calibration.num_alarms) == (640, 0)


def test_what_was_learned_fades_and_a_new_drafter_starts_afresh() -> None:
    calibration = OnlineCalibration(GAMMA)
    for _ in range(100):
        calibration.observe(verified(64, 2))
    assert calibration.num_rounds == 6400
    assert calibration._evidence.num_rounds < 1.2 * MEMORY_ROUNDS
    assert calibration.shifts.any()
    calibration.restart()
    assert not calibration.shifts.any()
    assert np.isnan(calibration.reliability.ece).all()


def test_certain_confidences_stay_finite() -> None:
    calibration = OnlineCalibration(GAMMA)
    for sure in (0.0, 1.0):
        for accepted in (0, GAMMA):
            for _ in range(20):
                calibration.observe(verified(LOOK_ROUNDS, accepted, sure))
                assert np.isfinite(calibration.shifts).all()


def test_what_confidences_are_off_by_at_the_beginning_of_answers_is_learned() -> None:
    """The first rounds of every stream are accepted more often than those of streams that have run for long."""
    calibration, rng = OnlineCalibration(GAMMA), np.random.default_rng(4)
    whole, age = np.full(BATCH, GAMMA), np.arange(BATCH) * 3
    streams = np.arange(BATCH, dtype=np.uint64)
    for _ in range(600):
        truth = rng.normal(0, 1, (BATCH, GAMMA))
        chance = to_probability(truth + np.where(age < 4, 1.0, -0.5)[:, None])
        would = (rng.random((BATCH, GAMMA)) < chance).cumprod(axis=1).sum(axis=1)
        confidences = to_probability(truth).astype(np.float32)
        calibration.observe(Rounds(confidences, whole, would, whole, streams.copy()))
        age = np.where(age == 23, 0, age + 1)
        streams[age == 0] += np.uint64(BATCH)
    apart = calibration.ages.of(np.array([0.0, 2.0, 23.0]))
    assert apart[:2] - apart[2] == pytest.approx([1.5, 1.5], abs=0.7)
    assert calibration.beyond(np.array([10_000], np.uint64)) == pytest.approx(apart[:1])
    assert (calibration.streams.ages(streams) == age).all()


def test_blocks_of_one_token_are_calibrated_too() -> None:
    calibration, rng = OnlineCalibration(1), np.random.default_rng(0)
    whole, keys = np.ones(8, np.int64), np.arange(8, dtype=np.uint64)
    for step in range(200):
        accepted = (rng.random(8) < 0.8).astype(np.int64)
        confidences = np.full((8, 1), 0.5, np.float32)
        calibration.observe(
            Rounds(confidences, whole, accepted, whole, keys + np.uint64(step // 40 * 8))
        )
    assert to_probability(calibration.shifts)[0] == pytest.approx(0.8, abs=0.06)
