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

import numpy as np
import numpy.typing as npt

from actors.core.recent_rounds import RecentRounds
from actors.core.reliability import Reliability
from actors.core.stream_shifts import StreamShifts
from configs.calibration import CalibrationConfig

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]
Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

MEMORY_ROUNDS = 1024.0  # after so many a share 1 / e of what was learned is left
REFERENCE_ROUNDS = 4096.0  # the same of what recent rounds are held against: not to follow them
CHECK_ROUNDS = 32  # rounds between two fits, and two looks for a change
CHECK_STEPS = 4  # but at most every so many steps: a large batch shall not pay for it each time
WARM_UP_ROUNDS = 96  # of a fit, before its predictions are held against labels
DOUBTED_ROUNDS = 8.0  # what all older evidence still counts for after an alarm

SHIFT_SPREAD = 1.0  # prior standard deviation of the common shift, in logits, at most
USUAL_SPREAD = 0.25  # and at least: what traffic of another kind is off by
LEAST_SPREAD = 0.05  # of a position around the common one, where labels show no more
NEWTON_STEPS = 2  # from the last fit on, so few are enough
MAX_LOGIT = 8.0
NUM_BINS = 64  # of logits, for the sums a fit rests on


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
        alarm_deviations: float = CalibrationConfig().alarm_deviations,
        learns: bool = True,
    ) -> None:
        self.gamma = gamma
        self.num_alarms = 0
        self.num_rounds = 0
        self.expect(explore_share)
        self._alarm_deviations = alarm_deviations
        self._learns = learns
        self.restart()

    def expect(self, explore_share: float) -> None:
        """From now on such a share of the rounds is verified whole whatever the budget says."""
        self._explore_share = explore_share or 1.0  # 0: nothing is seen beyond the budget

    def restart(self) -> None:
        """Forget everything: another drafter has come."""
        gamma = self.gamma
        self.shifts: Float64 = np.zeros(gamma)
        self.streams = StreamShifts()
        self.reliability = Reliability.zero(gamma)
        self._evidence, self._long = _Evidence(gamma), _Evidence(gamma)
        self._reference: Float64 = np.zeros(gamma)
        self._recent = RecentRounds(gamma)
        self._until_check = CHECK_ROUNDS
        self._warming_up = WARM_UP_ROUNDS

    def observe(self, rounds: Rounds) -> bool:
        """Learn from N rounds; whether the alarm went off."""
        count = len(rounds.confidences)
        if not count:
            return False
        keep = float(np.exp(-count / MEMORY_ROUNDS))
        logits = to_logits(rounds.confidences)
        used = to_probability(logits + self.shifts + self.streams.of(rounds.streams)[:, None])
        lengths = rounds.verify_len, rounds.num_accepted, rounds.planned_len
        self.reliability.add(
            Reliability.of_rounds(used.cumprod(axis=1), *lengths, self._explore_share), keep
        )
        self.num_rounds += count
        if not self._learns:
            return False
        position = np.arange(self.gamma)
        seen = position < np.minimum(rounds.num_accepted + 1, rounds.verify_len)[:, None]
        accepted = position < rounds.num_accepted[:, None]
        self.streams.learn(
            rounds.streams,
            np.where(seen, accepted - used, 0.0).sum(axis=1),
            np.where(seen, used * (1 - used), 0.0).sum(axis=1),
        )
        expected = to_probability(logits + self._reference)
        self._recent.add(logits, seen, accepted, expected, rounds.streams, self._long.num_rounds)
        news = _sums(logits, seen, accepted)
        self._evidence.add(count, news, keep)
        self._long.add(count, news, float(np.exp(-count / REFERENCE_ROUNDS)))
        self._until_check -= count
        if self._until_check > 0:
            return False
        looked_at = max(CHECK_ROUNDS, CHECK_STEPS * count)
        self._until_check = looked_at
        self._warming_up -= looked_at
        if self._warming_up >= 0:
            self._recent.num_judged = 0  # it was predicted from next to nothing
        num_changed = self._recent.rounds_since_change(self._alarm_deviations)
        if num_changed:
            self._forget(num_changed)
        before = self.shifts
        alike = self._recent.alike()
        self.shifts, self._reference = self._evidence.fit(alike), self._long.fit(alike)
        self.streams.others_moved(float((self.shifts - before)[0]))
        return num_changed > 0

    def _forget(self, num_kept: int) -> None:
        """All but the newest rounds; not quite, as the stretch that stands out most is in part picked by chance."""
        self.num_alarms += 1
        self._warming_up = WARM_UP_ROUNDS
        self.reliability = Reliability.zero(self.gamma)
        news = _sums(*self._recent.labels(num_kept))
        for evidence in (self._evidence, self._long):
            evidence.shrink(DOUBTED_ROUNDS)
            evidence.add(num_kept, news)
        self._recent.num_judged = 0


class _Evidence:
    """Labels seen by position and bin of the logit, [gamma, NUM_BINS] each: all that a fit needs, and it fades."""

    def __init__(self, gamma: int) -> None:
        self.num_rounds = 0.0  # that still count
        self._sums = np.zeros((3, gamma, NUM_BINS))  # seen, accepted, sum of logits
        self._common = 0.0
        self._own: Float64 = np.zeros(gamma)

    def add(self, num_rounds: int, sums: Float64, keep: float = 1.0) -> None:
        self.num_rounds = keep * self.num_rounds + num_rounds
        self._sums *= keep
        self._sums += sums

    def shrink(self, num_rounds: float) -> None:
        """Let all of it count for no more than so many rounds."""
        keep = min(1.0, num_rounds / self.num_rounds)
        self.num_rounds *= keep
        self._sums *= keep

    def fit(self, alike: float = 1.0) -> Float64:
        """Newton's method on the penalised likelihood: one common shift first, then each position around it.

        The prior of the latter is as wide as the labels of all positions together say (empirical Bayes).
        """
        seen, accepted, total = self._sums
        logits = total / np.maximum(seen, 1e-9)
        seen, accepted = seen / alike, accepted / alike
        common, own = self._common, self._own
        for _ in range(NEWTON_STEPS):
            gain, curve = _slopes(logits + common, seen, accepted)
            known = curve.sum() + 1e-9
            likeliest = common + gain.sum() / known
            width = float(np.clip(likeliest**2 - 1 / known, USUAL_SPREAD**2, SHIFT_SPREAD**2))
            slope = gain.sum() - common / width
            common += float(np.clip(slope / (known + 1 / width), -1, 1))
        # How much positions differ among themselves, beyond what chance makes of so many labels.
        gain, curve = _slopes(logits + common, seen, accepted)
        chance = (gain**2 / (curve + 1e-9)).sum() - (len(own) - 1)
        spread = float(np.clip(chance / (curve.sum() + 1e-9), LEAST_SPREAD**2, SHIFT_SPREAD**2))
        for _ in range(NEWTON_STEPS):
            gain, curve = _slopes(logits + (common + own)[:, None], seen, accepted)
            own = own + np.clip((gain - own / spread) / (curve + 1 / spread), -1, 1)
        self._common, self._own = common, own
        fitted: Float64 = np.clip(common + own, -MAX_LOGIT, MAX_LOGIT)
        return fitted


def _sums(logits: Float64, seen: Mask, accepted: Mask) -> Float64:
    """What `_Evidence` keeps of N rounds [N, gamma]: slots seen, accepted, and their logits summed."""
    gamma = logits.shape[1]
    rows, at = np.nonzero(seen)
    values = logits[rows, at]
    bins = ((values + MAX_LOGIT) * (NUM_BINS / (2 * MAX_LOGIT))).astype(np.int64)
    flat = at * NUM_BINS + np.clip(bins, 0, NUM_BINS - 1)
    size = gamma * NUM_BINS
    sums = [np.bincount(flat, weight, size) for weight in (None, accepted[rows, at], values)]
    return np.array(sums, np.float64).reshape(3, gamma, NUM_BINS)


def _slopes(logits: Float64, seen: Float64, accepted: Float64) -> tuple[Float64, Float64]:
    """First and negated second derivative [gamma] of the log likelihood of the labels that were seen."""
    p = to_probability(logits)
    return (accepted - seen * p).sum(axis=1), (seen * p * (1 - p)).sum(axis=1)


def to_logits(p: npt.NDArray[np.floating]) -> Float64:
    """Of probabilities, kept within +-MAX_LOGIT."""
    edge = 1 / (1 + np.exp(MAX_LOGIT))
    clipped = np.clip(p.astype(np.float64), edge, 1 - edge)
    result: Float64 = np.log(clipped) - np.log1p(-clipped)
    return result


def to_probability(logits: Float64) -> Float64:
    result: Float64 = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return result
