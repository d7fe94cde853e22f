"""Calibration kept true while serving: shifts of the confidence logits learned from verified rounds, and a drift alarm.

A budget censors what can be learned: slot k of a block shows whether it would have been accepted only if it was
scheduled and every slot before it was accepted. Among those rounds the *conditional* acceptance is still seen without
bias, because whether slot k is verified never depends on its own token (C3); so shifts are fitted to conditional
labels. The *survival* of a whole prefix is known only of rounds verified to the end. They are a choice of the budget,
so a small share of rounds is verified whole whatever the budget says, and counts for all the rounds it stands for.

Traffic changes faster than text is trained for. When predictions and labels of the last rounds part further than chance
explains, an alarm is counted, rounds from before the change are forgotten, and the shifts are fitted anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]

FULL_SHARE = 1 / 64  # of the rounds are verified whole whatever the budget says

WINDOW_ROUNDS = 4096  # shifts are fitted to at most so many
RECENT_ROUNDS = 96  # an alarm looks at so many, and leaves those since the change
LEAST_ROUNDS = 16  # but never fewer than so many
CHECK_ROUNDS = 32  # rounds between two looks
REFIT_SHARE = 8  # a fit waits until an eighth of what it rests on is new, so that its cost per round stays the same
WHOLE_ROUNDS = 2048  # kept to measure the survivals

SHIFT_SPREAD = 1.0  # prior standard deviation of the common shift, in logits
POSITION_SPREAD = 0.1  # of a position around the common one
NEWTON_STEPS = 4
MAX_LOGIT = 8.0

ALARM_DEVIATIONS = 5.0  # of the labels from what was predicted, common or of one position
ALARM_GAP = 0.03  # and in probability: many labels make small gaps certain, not important

NUM_BINS = 15


@dataclass(frozen=True)
class Reliability:
    """How true the survivals have been, over the whole rounds remembered."""

    predicted: Float64  # [gamma] mean predicted survival; NaN without a whole round
    happened: Float64  # [gamma] mean survival
    ece: Float64  # [gamma] expected calibration error
    num_whole: int  # rounds it rests on
    num_explored: int  # of them verified whole for this purpose alone


class _Ring:
    """The last `size` rows of one array."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._rows = np.zeros((size, *shape), dtype)
        self._next = self.count = 0

    def append(self, rows: npt.NDArray[np.generic]) -> None:
        size = len(self._rows)
        rows = rows[-size:]
        where = (self._next + np.arange(len(rows))) % size
        self._rows[where] = rows
        self._next = (self._next + len(rows)) % size
        self.count = min(size, self.count + len(rows))

    def last(self, count: int) -> npt.NDArray[np.generic]:
        """The newest `count` rows (fewer where there are fewer), oldest first."""
        size = len(self._rows)
        count = min(count, self.count)
        return self._rows[(self._next - count + np.arange(count)) % size]

    def keep(self, count: int) -> None:
        """Forget all but the newest `count` rows."""
        self.count = min(self.count, count)


class OnlineCalibration:
    """Shifts for the gamma positions of one rank's blocks.

    Attributes:
        shifts: [gamma] added to confidence logits; zeros until something was learned.
        num_alarms: times the predictions were found to have drifted away.
        num_rounds: rounds learned from.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.num_alarms = 0
        self.num_rounds = 0
        self.restart()

    def restart(self) -> None:
        """Forget everything: another drafter has come."""
        gamma = self.gamma
        self.shifts: Float64 = np.zeros(gamma)
        self._logits = _Ring(WINDOW_ROUNDS, (gamma,), np.float64)
        self._seen = _Ring(WINDOW_ROUNDS, (gamma,), np.bool_)
        self._accepted = _Ring(WINDOW_ROUNDS, (gamma,), np.bool_)
        self._used = _Ring(WINDOW_ROUNDS, (gamma,), np.float64)
        self._whole = _Ring(WHOLE_ROUNDS, (gamma,), np.float64)
        self._whole_accepted = _Ring(WHOLE_ROUNDS, (), np.int64)
        self._whole_weight = _Ring(WHOLE_ROUNDS, (), np.float64)
        self._until_check = self._until_fit = CHECK_ROUNDS
        self._until_alarm = RECENT_ROUNDS
        self._num_fitted = 0  # rounds the shifts rest on

    def adjust(self, confidences: Float32) -> Float32:
        """Return conditional confidences [N, gamma] as they are now believed, from the drafter's own.

        Depends on rounds that are over and on these confidences, so it is as lawful as they are.
        """
        if not self.shifts.any():
            return confidences
        adjusted: Float32 = _sigmoid(_logit(confidences) + self.shifts).astype(np.float32)
        return adjusted

    def observe(
        self, confidences: Float32, verify_len: Ints, num_accepted: Ints, explored: Mask
    ) -> bool:
        """Learn from N rounds that had a block; return whether the alarm went off.

        Args:
            confidences: [N, gamma] as the drafter gave them.
            verify_len: [N] draft tokens scheduled.
            num_accepted: [N] draft tokens accepted.
            explored: [N] rounds verified whole although the budget would not have.
        """
        if not len(confidences):
            return False
        logits = _logit(confidences)
        position = np.arange(self.gamma)
        reach = np.minimum(num_accepted + 1, verify_len)
        used = _sigmoid(logits + self.shifts)
        self._logits.append(logits)
        self._used.append(used)
        self._seen.append(position < reach[:, None])
        self._accepted.append(position < num_accepted[:, None])
        whole = verify_len == self.gamma
        self._whole.append(used[whole].cumprod(axis=1))
        self._whole_accepted.append(num_accepted[whole].astype(np.int64))
        self._whole_weight.append(np.where(explored[whole], 1 / FULL_SHARE, 1.0))
        self.num_rounds += len(confidences)
        self._until_check -= len(confidences)
        self._until_fit -= len(confidences)
        self._until_alarm -= len(confidences)
        if self._until_check > 0:
            return False
        self._until_check = CHECK_ROUNDS
        alarm = self._until_alarm <= 0 and self._has_drifted()
        if alarm:
            self._forget(self._rounds_since_change())
        if alarm or self._until_fit <= 0:
            self._fit()
            self._until_fit = max(CHECK_ROUNDS, self._logits.count // REFIT_SHARE)
        return alarm

    def reliability(self) -> Reliability:
        """Measure predicted against actual survivals of the whole rounds remembered."""
        survival = self._whole.last(WHOLE_ROUNDS).astype(np.float64)
        lengths = self._whole_accepted.last(WHOLE_ROUNDS).astype(np.int64)
        weight = self._whole_weight.last(WHOLE_ROUNDS).astype(np.float64)
        num_explored = int((weight > 1).sum())
        if not len(survival):
            nothing = np.full(self.gamma, np.nan)
            return Reliability(nothing, nothing, nothing, 0, 0)
        happened = lengths[:, None] > np.arange(self.gamma)
        share = (weight / weight.sum())[:, None]
        bins = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        gaps = share * (survival - happened)
        error = [
            np.abs(np.bincount(bins[:, k], gaps[:, k], NUM_BINS)).sum() for k in range(self.gamma)
        ]
        return Reliability(
            (share * survival).sum(axis=0),
            (share * happened).sum(axis=0),
            np.array(error),
            len(survival),
            num_explored,
        )

    def _residuals(self) -> tuple[Float64, Float64, Mask]:
        """Label less prediction, variance and whether it was seen, each [RECENT_ROUNDS, gamma], 0 where it was not."""
        seen = self._seen.last(RECENT_ROUNDS).astype(np.bool_)
        used = self._used.last(RECENT_ROUNDS).astype(np.float64)
        accepted = self._accepted.last(RECENT_ROUNDS).astype(np.bool_)
        residual = np.where(seen, accepted - used, 0.0)
        return residual, np.where(seen, used * (1 - used), 0.0), seen

    def _has_drifted(self) -> bool:
        residuals, variances, seen = self._residuals()
        # All positions together stand last. Shifts fitted to few rounds are themselves uncertain.
        residual = np.append(residuals.sum(axis=0), residuals.sum())
        variance = np.append(variances.sum(axis=0), variances.sum()) + 1e-9
        count = np.maximum(np.append(seen.sum(axis=0), seen.sum()), 1)
        if self._num_fitted:
            variance *= 1 + RECENT_ROUNDS / self._num_fitted
        bound = np.maximum(ALARM_DEVIATIONS * np.sqrt(variance), ALARM_GAP * count)
        return bool((np.abs(residual) > bound).any())

    def _rounds_since_change(self) -> int:
        """The number of last rounds whose residuals part furthest from nothing: where a cumulated sum turns."""
        residuals, _, _ = self._residuals()
        parted = np.abs(residuals[::-1].sum(axis=1).cumsum())
        return max(LEAST_ROUNDS, int(parted.argmax()) + 1)

    def _forget(self, num_kept: int) -> None:
        self.num_alarms += 1
        self._until_alarm = RECENT_ROUNDS
        for ring in (self._logits, self._seen, self._accepted, self._used):
            ring.keep(num_kept)
        for ring in (self._whole, self._whole_accepted, self._whole_weight):
            ring.keep(0)

    def _fit(self) -> None:
        """Newton's method on the penalised likelihood: one common shift first, then each position around it."""
        logits = self._logits.last(WINDOW_ROUNDS).astype(np.float64)
        seen = self._seen.last(WINDOW_ROUNDS).astype(np.bool_)
        accepted = self._accepted.last(WINDOW_ROUNDS).astype(np.bool_)
        common = np.zeros(1)
        for _ in range(NEWTON_STEPS):
            gain, curve = _slopes(logits + common, seen, accepted)
            step = gain.sum() - common / SHIFT_SPREAD**2
            common = common + step / (curve.sum() + 1 / SHIFT_SPREAD**2)
        own = np.zeros(self.gamma)
        for _ in range(NEWTON_STEPS):
            gain, curve = _slopes(logits + common + own, seen, accepted)
            own += (gain - own / POSITION_SPREAD**2) / (curve + 1 / POSITION_SPREAD**2)
        self.shifts = np.clip(common + own, -MAX_LOGIT, MAX_LOGIT)
        self._num_fitted = len(logits)


def _slopes(logits: Float64, seen: Mask, accepted: Mask) -> tuple[Float64, Float64]:
    """First and negated second derivative [gamma] of the log likelihood of the labels that were seen."""
    p = _sigmoid(logits)
    return np.where(seen, accepted - p, 0.0).sum(axis=0), np.where(seen, p * (1 - p), 0.0).sum(0)


def _logit(p: npt.NDArray[np.floating]) -> Float64:
    edge = _sigmoid(np.array(-MAX_LOGIT))
    clipped = np.clip(p.astype(np.float64), edge, 1 - edge)
    result: Float64 = np.log(clipped) - np.log1p(-clipped)
    return result


def _sigmoid(x: Float64) -> Float64:
    result: Float64 = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result
