"""The step time of a lockstep group: T = max_r f_r(R_r, B_r, context_r) + g(sum_r B_r) (contract C6).

f_r is what a rank does on its own (attention, drafting, its dense layers), g what the group does together (experts,
collectives). The measured curve of each rank is the prior: f_r is that curve, g is nothing. Served steps then move
one factor common to all curves, the cost of a context token, a factor per rank, and g on a few knots.

A step's time alone says little about who held it up: it is laid to the rank that should have been the slowest, so a
slow machine looks like the others. Where ranks tell what they did for their own tokens there is nothing to guess: each
factor follows that rank's own time, and drafting and g are what remains beside the slowest.

SPS of an isolated node is the case of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.group_times import GroupTimes, SharedTime, drafting_s, kinds_of
from actors.core.sps import CostCurve

Float64 = npt.NDArray[np.float64]

FORGETTING = 0.998  # a served step counts half after some 350 later ones
OUTLIER_LOG = (
    0.4  # a step this far (as a log ratio) outside the model pulls no harder than one this far
)
SURPRISES_TO_RESTART = 12  # so many outliers in a row are a new regime, not bad luck
ERROR_SMOOTHING = 0.95
MIN_SERVED_STEPS = 16
CALIBRATION_STEPS = 4  # their median says how much slower everything is than it was measured
MAX_ERROR_LOG = 0.35  # mean prediction error above which the model is not to be searched over
NOISE_SHARE = 0.01  # of a step in the noise of its like: slower than the error, so that a new regime is not noise
MAX_NOISE_LOG = 0.7  # the same where served times are as far from their own mean
RANK_STEP_LOG = 0.01  # how fast the factor of a single rank moves
RANK_NOISE_LOG = 0.02  # a mean gap below this says nothing about one rank
OWN_GAIN = 0.05  # of a told time's gap, moves its rank's factor; the first few count evenly


@dataclass(frozen=True)
class RankStep:
    """What one rank brought to a step, or will bring to the next one."""

    curve: CostCurve
    num_blocks: int  # requests it drafts for: none while drafting is paused
    batch_tokens: int  # all tokens of a served step; requests and prefill of a planned one
    context_tokens: int = 0


class LockstepModel:
    """T of one group, learned from its served steps.

    Attributes:
        num_outliers: steps whose pull was bounded.
        num_restarts: times a run of outliers was taken for a new regime.
        tells_own: curves hold what each rank does for its own tokens, and served steps are told apart likewise.
    """

    def __init__(self, num_ranks: int, shared: SharedTime | None = None) -> None:
        """`shared`: what is known of g (`group_times.split_profiles`); None means that the curves hold all there is."""
        assert num_ranks > 0
        knots: Float64 = 4.0 ** np.arange(2, 10, dtype=np.float64)
        self._knots = knots
        self._known_shared = np.zeros(len(knots)) if shared is None else shared(knots)
        self.rank_scale = np.ones(num_ranks)
        self.tells_own = False
        self.num_steps = self.num_outliers = self.num_restarts = 0
        self._surprises = 0
        self._error_log = 0.0
        self._mean_log = self._spread_log = 0.0  # of served times, and how far one lies from it
        self._first_gaps: list[float] = []
        self._rank_gap = np.zeros(num_ranks)
        self._num_own = np.zeros(num_ranks)  # steps of which each rank told its own time
        # Unknowns: the common factor of all curves (with `tells_own`, of drafting only); then, in `_unit`s, the cost of
        # a million context tokens, what g costs at its first knot, and what it adds up to each following one. None is
        # negative.
        self._weights = np.zeros(2 + len(knots))
        self._weights[0] = 1.0
        self._initial = self._weights.copy()
        self._covariance = self._prior()
        self._unit = 0.0  # seconds of a typical step, so that the prior has a scale

    @property
    def prediction_error(self) -> float:
        """Mean relative error of recent predictions, each made before its step was learned from."""
        return float(np.expm1(self._error_log))

    @property
    def is_trusted(self) -> bool:
        """False when measurement and prediction have parted; the group then falls back to each rank's own policy.

        Where times jump about, whatever the step, no prediction is near; it has then to be about as good as their mean.
        """
        allowed = max(MAX_ERROR_LOG, min(1.25 * self._spread_log, MAX_NOISE_LOG))
        return self.num_steps < MIN_SERVED_STEPS or self._error_log <= allowed

    def measured(self, rank_scale: Float64, shared: SharedTime | None) -> None:
        """Curves are known, or have changed.

        Args:
            rank_scale: [n] how much slower each rank is than the curve of its kind.
            shared: g, where the curves hold each rank's own part only; None: they hold all there is.
        """
        self.rank_scale = rank_scale
        self.tells_own = shared is not None
        self._num_own[:] = 0
        if shared is not None:
            self._known_shared = shared(self._knots)
            self._weights[:2] = 1.0, 0.0
            self._covariance = self._prior()
            self._unit = 0.0

    def times(self, steps: Sequence[RankStep]) -> GroupTimes:
        """What the coming step will cost, as a function of the draft tokens of each rank."""
        assert len(steps) == len(self.rank_scale)
        common = max(self._weights[0], 1e-3)
        scale = self.rank_scale if self.tells_own else self.rank_scale * common
        curves = tuple(step.curve for step in steps)
        blocks = np.array([step.num_blocks for step in steps])
        drafting = np.empty(len(steps))
        for curve, rows in kinds_of(curves):
            drafting[rows] = drafting_s(curve, blocks[rows])
        # All wait for whoever waits longest for its blocks, before any of them computes.
        drafting = (
            np.full(len(steps), common * drafting.max()) if self.tells_own else scale * drafting
        )
        context = np.array([step.context_tokens for step in steps], np.float64)
        context_s = self._weights[1] * self._unit * context / 1e6
        return GroupTimes(
            curves,
            scale,
            drafting + context_s,
            np.array([step.batch_tokens for step in steps], np.int64),
            SharedTime(self._knots, self._shared_s()),
        )

    def predict_s(self, steps: Sequence[RankStep]) -> float:
        """T of a step whose `batch_tokens` are complete."""
        return self.times(steps).step_time_s(np.zeros(len(steps)))

    def fold(
        self, steps: Sequence[RankStep], served_s: float, own_s: Sequence[float] | None = None
    ) -> None:
        """Learn from one served step of the group. A time that is not positive and finite is left out.

        Args:
            own_s: [n] what of it each rank did for its own tokens, 0 where that is unknown; used with `tells_own`.
        """
        if not (np.isfinite(served_s) and served_s > 0):
            self.num_outliers += 1
            return
        self._start(served_s)
        if len(self._first_gaps) < CALIBRATION_STEPS and not self.tells_own:
            self._calibrate(steps, served_s)
        times = self.times(steps)
        own = times.rank_times_s(np.zeros(len(steps)))
        slowest = int(own.argmax())
        total = int(times.base_tokens.sum())
        gap = float(np.log(served_s / (own[slowest] + float(times.shared(total)))))
        self.num_steps += 1
        self._error_log = (
            ERROR_SMOOTHING * self._error_log + (1 - ERROR_SMOOTHING) * min(abs(gap), 2.0)
            if self.num_steps > 1
            else min(abs(gap), OUTLIER_LOG)
        )
        self._compare(float(np.log(served_s)))
        if abs(gap) > OUTLIER_LOG:
            self.num_outliers += 1
            self._surprises += 1
            gap = float(np.copysign(OUTLIER_LOG, gap))
            if self._surprises >= SURPRISES_TO_RESTART:
                self._restart()
        else:
            self._surprises = 0
        if self.tells_own:
            self._learn_apart(times, served_s, np.zeros(len(own)) if own_s is None else own_s)
        else:
            self._learn(times, steps[slowest], slowest, total, gap)

    def _compare(self, served_log: float) -> None:
        """What the mean of served times would have foretold."""
        if self.num_steps == 1:
            self._mean_log = served_log
        share, away = max(NOISE_SHARE, 1.0 / self.num_steps), served_log - self._mean_log
        self._mean_log += share * away
        self._spread_log += share * (min(abs(away), 2.0) - self._spread_log)

    def _start(self, served_s: float) -> None:
        """The first step gives the unit in which the known g becomes the first guess."""
        if not self._unit:
            self._unit = served_s
            self._weights[2:] = np.diff(self._known_shared, prepend=0.0) / served_s
            self._initial = self._weights.copy()

    def _calibrate(self, steps: Sequence[RankStep], served_s: float) -> None:
        """A curve was measured while nothing else ran. Where the first steps are far from it, they all share a factor,
        which is taken over at once: small steps would take it for a model that cannot be trusted."""
        learned, self._weights = self._weights, self._initial
        self._first_gaps.append(float(np.log(served_s / self.predict_s(steps))))
        self._weights = learned
        factor_log = float(np.median(self._first_gaps))
        if len(self._first_gaps) == CALIBRATION_STEPS and abs(factor_log) > OUTLIER_LOG:
            self._weights = self._initial * np.exp(factor_log)
            self._covariance = self._prior()
            self._surprises, self._error_log = 0, 0.0

    def _learn(
        self, times: GroupTimes, step: RankStep, slowest: int, total: int, gap: float
    ) -> None:
        """All unknowns, from the time of the whole; then the factor of the slowest rank takes a small share."""
        predicted = times.step_time_s(np.zeros(len(times.scale)))
        curve_s = (
            float(step.curve.verify_time_s(step.batch_tokens))
            + float(drafting_s(step.curve, step.num_blocks))
        ) * self.rank_scale[slowest]
        features = np.concatenate(
            [
                [curve_s, step.context_tokens / 1e6 * self._unit],
                _ramps(self._knots, total) * self._unit,
            ]
        )
        self._pull(features / predicted, gap)
        if len(self.rank_scale) > 1:
            self._scale_rank(slowest, gap)

    def _learn_apart(self, times: GroupTimes, served_s: float, own_s: npt.ArrayLike) -> None:
        """What the ranks did by themselves is told: it moves their factors; what is left are drafting and g."""
        told = np.asarray(own_s, np.float64)
        expected = times.rank_times_s(np.zeros(len(told))) - times.offset_s
        is_told = np.isfinite(told) & (told > 0) & (times.base_tokens > 0)
        own = np.where(is_told, told, expected)
        self._num_own += is_told
        # A first time may be far off: the curve was measured when the machine did something else.
        gain = np.maximum(OWN_GAIN, 1.0 / np.maximum(self._num_own, 1))
        limit = np.where(self._num_own > CALIBRATION_STEPS, OUTLIER_LOG, np.inf)
        gaps = np.clip(np.log(own / expected), -limit, limit)
        self.rank_scale = self.rank_scale * np.exp(gain * gaps)
        total, drafting = int(times.base_tokens.sum()), float(times.offset_s.max())
        predicted = drafting + float(own.max() + times.shared(total))
        gap = float(np.clip(np.log(served_s / predicted), -OUTLIER_LOG, OUTLIER_LOG))
        features = np.concatenate(
            [[drafting / max(self._weights[0], 1e-3), 0.0], _ramps(self._knots, total) * self._unit]
        )
        self._pull(features / predicted, gap)

    def _pull(self, features: Float64, gap: float) -> None:
        """One step of recursive least squares on relative time. features: [unknowns], as shares of the step."""
        gain = self._covariance @ features
        gain /= FORGETTING + features @ gain
        self._weights += gain * np.expm1(gap)
        np.maximum(self._weights, 0.0, out=self._weights)
        self._covariance = (
            self._covariance - np.outer(gain, features @ self._covariance)
        ) / FORGETTING
        np.clip(self._covariance, -1e3, 1e3, out=self._covariance)

    def _scale_rank(self, slowest: int, gap: float) -> None:
        """One rank's factor creeps while steps it holds up keep missing one way; the mean stays one, since the common
        factor holds the rest. Small gaps are noise: following them would make the slowest rank of the moment slower."""
        smoothed = 0.9 * self._rank_gap[slowest] + 0.1 * gap
        self._rank_gap[slowest] = smoothed
        beyond = np.sign(smoothed) * max(abs(smoothed) - RANK_NOISE_LOG, 0.0)
        self.rank_scale[slowest] *= np.exp(np.clip(0.1 * beyond, -RANK_STEP_LOG, RANK_STEP_LOG))
        self.rank_scale /= np.exp(np.log(self.rank_scale).mean())

    def _restart(self) -> None:
        """Forget how sure the model was, not what it knew: the next steps move it fast."""
        self.num_restarts += 1
        self._surprises = 0
        self._covariance = self._prior()

    def _prior(self) -> Float64:
        """How far each unknown may lie from its start, before steps say so: the square of the deviation."""
        return np.diag([0.25, 1.0, 0.1] + [0.03] * (len(self._knots) - 1))

    def _shared_s(self) -> Float64:
        if not self._unit:
            return self._known_shared
        seconds: Float64 = np.cumsum(self._weights[2:]) * self._unit
        return seconds


def _ramps(knots: Float64, at: float) -> Float64:
    """How much of the first knot's cost (all of it) and of every further piece is spent at `at`: [K]."""
    pieces = np.clip((at - knots[:-1]) / np.diff(knots), 0.0, 1.0)
    return np.concatenate([[1.0], pieces])
