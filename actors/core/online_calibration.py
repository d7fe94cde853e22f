"""Calibration kept true while serving: shifts of the confidence logits learned from verified rounds, and a drift alarm.

A budget censors what can be learned: slot k of a block shows whether it would have been accepted only if it was
scheduled and every slot before it was accepted. Among those rounds the *conditional* acceptance is still seen without
bias, because whether slot k is verified never depends on its own token (C3); so shifts are fitted to conditional
labels. A small share of rounds is verified whole whatever the budget says (`rank_calibration`), so that no position
goes unseen.

Texts differ among themselves more than kinds of text do, so every stream has a shift of its own beside
(`stream_shifts`), and what all share rests on many of them: labels of streams that err alike count for fewer.

What was learned fades. Traffic may change faster than that: when labels of the last rounds part from what a much longer
memory expects, further than chance and the differences among streams explain, an alarm is counted, rounds from before
the change are forgotten, and the shifts are fitted anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.core.age_shifts import AgeShifts
from actors.core.evidence import Evidence, sums_of, to_logits, to_probability, told_of
from actors.core.reliability import Reliability
from actors.core.stream_shifts import StreamShifts
from actors.core.traffic_change import Look, TrafficChange
from configs.calibration import CalibrationConfig

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]
Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MEMORY_ROUNDS = 1024.0  # after so many a share 1 / e of what was learned is left
REFERENCE_ROUNDS = 4096.0  # the same of what recent rounds are held against: not to follow them
LOOK_ROUNDS = 32  # rounds between two fits, and two looks for a change
LOOK_STEPS = 4  # but at most every so many steps: a large batch shall not pay for it each time
DOUBTED_ROUNDS = 2.0  # what all older evidence still counts for after an alarm


@dataclass(frozen=True)
class Rounds:
    """N finished rounds that had a block. A slot is seen when it was scheduled and every slot before it accepted."""

    confidences: Float32  # [N, gamma] as the drafter gave them
    verify_len: Ints  # [N] draft tokens scheduled
    num_accepted: Ints  # [N] of those
    planned_len: Ints  # [N] what the budget alone would have scheduled; less in explored rounds
    streams: Keys  # [N] rounds of one request share a key

    def rows(self, chosen: Mask) -> Rounds:
        return Rounds(*(array[chosen] for array in vars(self).values()))


class OnlineCalibration:
    """Shifts for the gamma positions of the blocks of one rank, under one acceptance rule.

    Attributes:
        shifts: [gamma] added to confidence logits of every stream; zeros until something was learned.
        streams: what each stream is off by beyond that.
        reliability: of the survivals as they were used, fading like what was learned; since the last alarm.
        num_alarms: times the predictions were found to have drifted away.
        num_rounds: rounds learned from.
    """

    def __init__(
        self,
        gamma: int,
        explore_share: float = 1.0,
        looks_per_alarm: float = CalibrationConfig().looks_per_alarm,
        learns: bool = True,
        num_known: int | None = None,
    ) -> None:
        """`num_known`: first slots whose confidence every block has, whatever it is worth; None: all."""
        self.gamma = gamma
        self.num_alarms = 0
        self.num_rounds = 0
        self.expect(explore_share)
        self._looks_per_alarm = looks_per_alarm
        self._learns = learns
        self._num_known = gamma if num_known is None else min(gamma, num_known)
        self.restart()

    def expect(self, explore_share: float) -> None:
        """From now on such a share of the rounds is verified whole whatever the budget says."""
        self._explore_share = explore_share or 1.0  # 0: nothing is seen beyond the budget

    def restart(self) -> None:
        """Forget everything: another drafter has come."""
        gamma = self.gamma
        self.shifts: Float64 = np.zeros(gamma)
        self.streams, self.ages = StreamShifts(), AgeShifts()
        self.reliability = Reliability.zero(gamma)
        self._evidence, self._long = Evidence(gamma), Evidence(gamma)
        self._reference: Float64 = np.zeros(gamma)
        self._change = TrafficChange(min(self._num_known, 2), self._looks_per_alarm)
        self._known = self._change.known(0.0, self._long.variance)
        self._new: list[_Seen] = []
        self._until_look = LOOK_ROUNDS

    def beyond(self, streams: Keys) -> Float64:
        """What these streams [N] are off by beyond `shifts`, [N] in logits."""
        return self.streams.of(streams) + self.ages.of(self.streams.ages(streams))

    def observe(self, rounds: Rounds) -> bool:
        """Learn from N rounds; whether the alarm went off."""
        count = len(rounds.confidences)
        if not count:
            return False
        logits = to_logits(rounds.confidences)
        ages = self.streams.ages(rounds.streams)
        aged = logits + self.ages.of(ages)[:, None]
        used = to_probability(aged + self.shifts + self.streams.of(rounds.streams)[:, None])
        lengths = rounds.verify_len, rounds.num_accepted, rounds.planned_len
        self.reliability.add(
            Reliability.of_rounds(used.cumprod(axis=1), *lengths, self._explore_share),
            float(np.exp(-count / MEMORY_ROUNDS)),
        )
        self.num_rounds += count
        if not self._learns:
            return False
        position = np.arange(self.gamma)
        seen = position < np.minimum(rounds.num_accepted + 1, rounds.verify_len)[:, None]
        accepted = position < rounds.num_accepted[:, None]
        self.streams.learn(rounds.streams, *told_of(used, seen, accepted))
        self._new.append(_Seen(logits, aged, seen, accepted, rounds.streams, ages))
        self._until_look -= count
        if self._until_look > 0:
            return False
        self._until_look = max(LOOK_ROUNDS, LOOK_STEPS * count)
        return self._look()

    def _look(self) -> bool:
        """Take in what came since the last look, in the mean over streams; whether the traffic has changed."""
        logits, aged, seen, accepted, streams, ages = map(
            np.concatenate, zip(*self._new, strict=True)
        )
        self._new.clear()
        labels, count = sums_of(aged, seen, accepted), len(aged)
        told = told_of(to_probability(aged + self._reference), seen, accepted)
        self.ages.learn(ages, *told_of(to_probability(aged + self.shifts), seen, accepted))
        look = Look.of(streams, *told, _features(logits[:, : self._num_known]), self._known, labels)
        for evidence, memory in ((self._evidence, MEMORY_ROUNDS), (self._long, REFERENCE_ROUNDS)):
            evidence.add(count, labels, float(np.exp(-count / memory)))
        num_changed = self._change.add(look)
        if num_changed:
            self.num_alarms += 1
            self.reliability = Reliability.zero(self.gamma)
            newest = self._change.forget(num_changed)
            for evidence in (self._evidence, self._long):
                evidence.shrink(DOUBTED_ROUNDS)
                evidence.add(float(newest[0, 0].sum()), newest)
        before, alike = self.shifts, self._change.alike()
        self.shifts, self._reference = self._evidence.fit(alike), self._long.fit(alike)
        self.streams.others_moved(float((self.shifts - before)[0]))
        self._known = self._change.known(self._long.common, self._long.variance)
        return num_changed > 0


class _Seen(NamedTuple):
    """Rounds that were observed and not yet looked at."""

    logits: Float64  # [N, gamma] as the drafter gave them
    aged: Float64  # [N, gamma] with what their streams' ages add
    seen: Mask  # [N, gamma]
    accepted: Mask  # [N, gamma]
    streams: Keys  # [N]
    ages: Float64  # [N]


def _features(logits: Float64) -> Float64:
    """How sure the drafter is of each round: of the first slot, and by how much less of the others, [N, 1 or 2]."""
    first, others = logits[:, :1], logits[:, 1:]
    if not others.shape[1]:
        return first
    return np.concatenate((first, others.mean(axis=1, keepdims=True) - first), axis=1)
