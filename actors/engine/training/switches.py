"""Calibration while serving, on traffic whose kind changes: simulated on the rounds of recorded answers.

Streams walk answers of one domain, each from its start; at the switch the answers that are running go on, and every new
one is of the other domain. Whole blocks are verified, so nothing is hidden by a budget. The error is that of all rounds
of the new domain's answers, each walked from its start with what the rank has learned by then and its own shift.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core.calibration import ece, ece_floor
from actors.core.evidence import to_logits, to_probability, told_of
from actors.core.online_calibration import OnlineCalibration, Rounds
from actors.core.stream_shifts import StreamShifts
from actors.engine.training.replay import Blocks

NUM_BINS = 20  # as everywhere in `dspark evaluate`
NUM_STREAMS = 8
STEPS_BEFORE = 300
MEASURED_AT = (0, 37, 300)  # steps after the switch; 37 of 8 streams are 300 rounds of requests
NUM_SEEDS = 3
STEADY_STEPS = 2500
LIMIT = 0.03  # error from which a slot counts as miscalibrated

Float64 = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]
Pools = Mapping[str, "Sequence[Walk]"]
Make = Callable[[int], OnlineCalibration]


@dataclass(frozen=True)
class Walk:
    """The rounds decoding makes of one answer, in order."""

    confidences: npt.NDArray[np.float32]  # [N, gamma]
    accepted: npt.NDArray[np.int64]  # [N]


def visited(blocks: Blocks, gamma: int) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Return the anchors that blocks of `gamma` visit and do not reach beyond the text from, and what each accepts."""
    lengths = blocks.prefix[:, :gamma].sum(axis=1)
    rows, at = [], 0
    while at < len(lengths):
        if blocks.inside[at, :gamma].all():
            rows.append(at)
        at += int(lengths[at]) + 1
    return rows, lengths[rows].astype(np.int64)


class Traffic:
    """Streams that walk answers drawn at random; a new answer is a new stream to the rank."""

    def __init__(self, answers: Sequence[Walk], num_streams: int, rng: np.random.Generator) -> None:
        self.answers = answers
        self._rng = rng
        self._walks = [self._drawn() for _ in range(num_streams)]
        self._at = [0] * num_streams
        self._keys = np.arange(num_streams, dtype=np.uint64)

    def step(self) -> Rounds:
        """Return the next round of every stream."""
        pairs = list(zip(self._walks, self._at, strict=True))
        confidences = np.stack([walk.confidences[at] for walk, at in pairs])
        accepted = np.array([walk.accepted[at] for walk, at in pairs])
        whole = np.full(len(pairs), confidences.shape[1])
        rounds = Rounds(confidences, whole, accepted, whole, self._keys.copy())
        for i, (walk, at) in enumerate(pairs):
            self._at[i] = at + 1
            if at + 1 == len(walk.accepted):
                self._walks[i], self._at[i] = self._drawn(), 0
                self._keys[i] = self._keys.max() + np.uint64(1)
        return rounds

    def _drawn(self) -> Walk:
        return self.answers[int(self._rng.integers(len(self.answers)))]


def forecast(calibration: OnlineCalibration, answers: Sequence[Walk]) -> tuple[Float64, Labels]:
    """Return survivals and labels, [N, gamma], of all rounds of the answers; the calibration learns nothing."""
    frozen = copy.copy(calibration)
    frozen.streams = StreamShifts()
    position = np.arange(calibration.gamma)
    survivals, labels = [], []
    for at in range(max(len(walk.accepted) for walk in answers)):
        alive = [i for i, walk in enumerate(answers) if len(walk.accepted) > at]
        confidences = np.stack([answers[i].confidences[at] for i in alive])
        num_accepted = np.array([answers[i].accepted[at] for i in alive])[:, None]
        keys = np.array(alive, np.uint64)
        used = to_probability(to_logits(confidences) + frozen.shifts + frozen.beyond(keys)[:, None])
        seen, accepted = position <= num_accepted, position < num_accepted
        frozen.streams.learn(keys, *told_of(used, seen, accepted))
        survivals.append(used.cumprod(axis=1))
        labels.append(accepted)
    return np.concatenate(survivals), np.concatenate(labels)


def denoised_error(survival: Float64, happened: Labels) -> float:
    """Calibration error less, bin by bin, the variance that labels have when forecasts are exactly right."""
    bins = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gap = np.bincount(bins, survival - happened, NUM_BINS)
    variance = np.bincount(bins, survival * (1 - survival), NUM_BINS)
    return float(np.sqrt(np.maximum(np.square(gap) - variance, 0.0)).sum() / len(survival))


@dataclass(frozen=True)
class Switch:
    """From one domain to another, as one rank saw it."""

    before: str
    after: str
    errors: Float64  # [times, gamma] noise taken out
    raw: Float64  # [times, gamma] with it
    floor: Float64  # [gamma] `raw` of exact forecasts, the last time
    num_rounds: int  # that errors are of
    alarms: list[int]  # steps after the switch

    @property
    def first_alarm(self) -> float:
        """Steps from the switch; infinity without one."""
        return self.alarms[0] if self.alarms else float("inf")


def switch(pools: Pools, before: str, after: str, seed: int, make: Make) -> Switch:
    """Simulate one switch."""
    rng = np.random.default_rng(seed)
    calibration = make(pools[before][0].confidences.shape[1])
    traffic = Traffic(pools[before], NUM_STREAMS, rng)
    for _ in range(STEPS_BEFORE):
        calibration.observe(traffic.step())
    traffic.answers = pools[after]
    alarms, errors, raw = [], [], []
    slots = range(calibration.gamma)
    for step in range(max(MEASURED_AT) + 1):
        if step in MEASURED_AT:
            survivals, labels = forecast(calibration, pools[after])
            errors.append([denoised_error(survivals[:, k], labels[:, k]) for k in slots])
            raw.append([ece(survivals[:, k], labels[:, k], NUM_BINS) for k in slots])
        if calibration.observe(traffic.step()):
            alarms.append(step + 1)
    floor = np.array([ece_floor(survivals[:, k], rng, NUM_BINS, 20) for k in slots])
    return Switch(
        before, after, np.array(errors), np.array(raw), floor, len(survivals),
        [step for step in alarms if step <= max(MEASURED_AT)],
    )  # fmt: skip


def steady_alarms(pools: Pools, seed: int, make: Make) -> dict[str, int]:
    """Return the alarms of `STEADY_STEPS` steps of each domain, served alone."""
    found = {}
    for i, (domain, answers) in enumerate(pools.items()):
        calibration = make(answers[0].confidences.shape[1])
        traffic = Traffic(answers, NUM_STREAMS, np.random.default_rng([seed, i]))
        found[domain] = sum(calibration.observe(traffic.step()) for _ in range(STEADY_STEPS))
    return found


def measure(pools: Pools, make: Make) -> dict[str, Any]:
    """Return what all ordered pairs of domains show, each with `NUM_SEEDS` seeds, and steady traffic."""
    pairs = list(permutations(sorted(pools), 2))
    found = [
        switch(pools, *pair, 100 * seed + i, make)
        for seed in range(NUM_SEEDS)
        for i, pair in enumerate(pairs)
    ]
    errors = np.array([each.errors for each in found])
    raw = np.array([each.raw for each in found])
    wrong = errors[:, 0].max(axis=1) >= LIMIT
    first = np.array([each.first_alarm for each in found])
    steady = [steady_alarms(pools, seed, make) for seed in range(NUM_SEEDS)]
    false = sum(sum(each.values()) for each in steady)
    return {
        "num_switches": len(found),
        "steps": list(MEASURED_AT),
        "error": errors.mean(axis=0).round(4).tolist(),
        "error_worst": errors.max(axis=(0, 2)).round(4).tolist(),
        "error_raw": raw.mean(axis=0).round(4).tolist(),
        "error_raw_worst": raw.max(axis=(0, 2)).round(4).tolist(),
        "floor": np.mean([each.floor for each in found], axis=0).round(4).tolist(),
        "under_limit": (errors.max(axis=2) < LIMIT).sum(axis=0).tolist(),
        "under_limit_raw": (raw.max(axis=2) < LIMIT).sum(axis=0).tolist(),
        "miscalibrated": int(wrong.sum()),
        "alarms_of_miscalibrated": [int((first[wrong] <= at).sum()) for at in MEASURED_AT],
        "alarms_of_others": [int((first[~wrong] <= at).sum()) for at in MEASURED_AT],
        "steady_steps": STEADY_STEPS * len(pools) * NUM_SEEDS,
        "steady_alarms": false,
        "each": [
            {
                "from": each.before,
                "to": each.after,
                "error": each.errors.round(4).tolist(),
                "error_raw": each.raw.round(4).tolist(),
                "floor": each.floor.round(4).tolist(),
                "num_rounds": each.num_rounds,
                "alarms": each.alarms,
            }
            for each in found
        ],
    }
