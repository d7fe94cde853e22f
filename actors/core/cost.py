"""The step time of a lockstep group: T = max_r f_r(R_r, B_r, context_r) + g(sum_r B_r) (contract C6).

f_r is what a rank does on its own (attention, drafting, its dense layers), g what the group does together (experts,
collectives). The measured curve of each rank is the prior: f_r is that curve, g is nothing. Served steps then move
one factor common to all curves, the cost of a context token, a factor per rank, and g on a few knots.

SPS of an isolated node is the case of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from actors.core.sps import CostCurve

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

FORGETTING = 0.998  # a served step counts half after some 350 later ones
OUTLIER_LOG = (
    0.4  # a step this far (as a log ratio) outside the model pulls no harder than one this far
)
SURPRISES_TO_RESTART = 12  # so many outliers in a row are a new regime, not bad luck
ERROR_SMOOTHING = 0.95
MIN_SERVED_STEPS = 16
MAX_ERROR_LOG = 0.35  # mean prediction error above which the model is not to be searched over
RANK_STEP_LOG = 0.01  # how fast the factor of a single rank moves
RANK_NOISE_LOG = 0.02  # a mean gap below this says nothing about one rank
_ROUNDING = 1e-12


@dataclass(frozen=True)
class SharedTime:
    """g: seconds over all tokens of the group; straight between knots, level before the first, never falling."""

    tokens: Float64  # [K] strictly ascending
    seconds: Float64  # [K] never decreasing

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.seconds) > 0
        assert (np.diff(self.tokens) > 0).all() and (np.diff(self.seconds) >= 0).all()

    @classmethod
    def none(cls) -> SharedTime:
        return cls(np.zeros(1), np.zeros(1))

    def __call__(self, total_tokens: npt.ArrayLike) -> Float64:
        total = np.asarray(total_tokens, np.float64)
        inside: Float64 = np.interp(total, self.tokens, self.seconds)
        if len(self.tokens) == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond: Float64 = np.maximum(total - self.tokens[-1], 0.0) * slope
        return inside + beyond


@dataclass(frozen=True)
class GroupTimes:
    """T of one coming step as a function of the draft tokens of each rank; all else about the step is fixed."""

    curves: tuple[CostCurve, ...]  # [n]; ranks of one kind share the object
    scale: Float64  # [n] factor on the curve
    offset_s: Float64  # [n] drafting and context
    base_tokens: (
        Int64  # [n] requests and prefill tokens: what is in the step before any draft token
    )
    shared: SharedTime = field(default_factory=SharedTime.none)

    def rank_times_s(self, drafts: npt.ArrayLike) -> Float64:
        """f_r of every rank. drafts: [n] or [n, X], the same shape comes back."""
        drafts = np.asarray(drafts, np.float64)
        extra = (1,) * (drafts.ndim - 1)
        tokens = drafts + self.base_tokens.reshape(-1, *extra)
        times = np.empty(drafts.shape)
        for curve, rows in kinds_of(self.curves):
            times[rows] = curve.verify_time_s(tokens[rows])
        return times * self.scale.reshape(-1, *extra) + self.offset_s.reshape(-1, *extra)

    def most_drafts(self, levels_s: Float64) -> Int64:
        """The most draft tokens each rank can take without f_r passing a level: [n, G], -1 where none fits at all."""
        room = (levels_s * (1 + _ROUNDING) - self.offset_s[:, None]) / self.scale[:, None]
        most = np.empty(room.shape)
        for curve, rows in kinds_of(self.curves):
            most[rows] = _most_tokens(curve, room[rows])
        drafts = np.clip(np.floor(most + 1e-9) - self.base_tokens[:, None], -1, 2**31)
        return drafts.astype(np.int64)

    def step_time_s(self, drafts: npt.ArrayLike) -> float:
        """T when the ranks verify these many draft tokens [n]."""
        drafts = np.asarray(drafts)
        total = int(self.base_tokens.sum() + drafts.sum())
        return float(self.rank_times_s(drafts).max() + self.shared(total))


def kinds_of(curves: tuple[CostCurve, ...]) -> list[tuple[CostCurve, npt.NDArray[np.intp]]]:
    """Each different curve with the ranks that share it."""
    first = curves[0]
    if all(curve is first for curve in curves):
        return [(first, np.arange(len(curves)))]
    kinds: dict[int, tuple[CostCurve, list[int]]] = {}
    for row, curve in enumerate(curves):
        kinds.setdefault(id(curve), (curve, []))[1].append(row)
    return [(curve, np.array(rows)) for curve, rows in kinds.values()]


def _most_tokens(curve: CostCurve, level_s: Float64) -> Float64:
    """The largest number of tokens (not an integer) whose verify time does not pass a level; -inf when none does."""
    tokens, times = curve.batch_tokens, curve.step_time_s
    at = np.searchsorted(times, level_s, side="right")  # knots within the level
    low = np.maximum(at - 1, 0)
    high = np.minimum(at, len(tokens) - 1)
    rise = times[high] - times[low]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = tokens[low] + (tokens[high] - tokens[low]) * (level_s - times[low]) / rise
        beyond = tokens[-1] + (level_s - times[-1]) / curve.tail_slope
    most = np.where(at == len(tokens), beyond, inside)
    return np.where(at == 0, -np.inf, np.where(np.isnan(most), np.inf, most))


@dataclass(frozen=True)
class RankStep:
    """What one rank brought to a step, or will bring to the next one."""

    curve: CostCurve
    num_requests: int
    batch_tokens: int  # all tokens of a served step; requests and prefill of a planned one
    context_tokens: int = 0


class LockstepModel:
    """T of one group, learned from its served steps.

    Attributes:
        num_outliers: steps whose pull was bounded.
        num_restarts: times a run of outliers was taken for a new regime.
    """

    def __init__(self, num_ranks: int, shared: SharedTime | None = None) -> None:
        """`shared`: what is known of g (`split_profiles`); None means that the curves hold all there is."""
        assert num_ranks > 0
        knots: Float64 = 4.0 ** np.arange(2, 10, dtype=np.float64)
        self._knots = knots
        self._known_shared = np.zeros(len(knots)) if shared is None else shared(knots)
        self.rank_scale = np.ones(num_ranks)
        self.num_steps = self.num_outliers = self.num_restarts = 0
        self._surprises = 0
        self._error_log = 0.0
        self._rank_gap = np.zeros(num_ranks)
        # Unknowns: the common factor of all curves; then, in `_unit`s, the cost of a million context tokens, what g
        # costs at its first knot, and what it adds up to each following one. None is negative.
        self._weights = np.zeros(2 + len(knots))
        self._weights[0] = 1.0
        self._covariance = self._prior()
        self._unit = 0.0  # seconds of a typical step, so that the prior has a scale

    @property
    def prediction_error(self) -> float:
        """Mean relative error of recent predictions, each made before its step was learned from."""
        return float(np.expm1(self._error_log))

    @property
    def is_trusted(self) -> bool:
        """False when measurement and prediction have parted; the group then falls back to each rank's own policy."""
        return self.num_steps < MIN_SERVED_STEPS or self._error_log <= MAX_ERROR_LOG

    def times(self, steps: Sequence[RankStep]) -> GroupTimes:
        """What the coming step will cost, as a function of the draft tokens of each rank."""
        assert len(steps) == len(self.rank_scale)
        scale = self.rank_scale * max(self._weights[0], 1e-3)
        curves = tuple(step.curve for step in steps)
        requests = np.array([step.num_requests for step in steps])
        drafting = np.empty(len(steps))
        for curve, rows in kinds_of(curves):
            drafting[rows] = drafting_s(curve, requests[rows])
        context = np.array([step.context_tokens for step in steps], np.float64)
        context_s = self._weights[1] * self._unit * context / 1e6
        return GroupTimes(
            curves,
            scale,
            scale * drafting + context_s,
            np.array([step.batch_tokens for step in steps], np.int64),
            SharedTime(self._knots, self._shared_s()),
        )

    def predict_s(self, steps: Sequence[RankStep]) -> float:
        """T of a step whose `batch_tokens` are complete."""
        return self.times(steps).step_time_s(np.zeros(len(steps)))

    def fold(self, steps: Sequence[RankStep], served_s: float) -> None:
        """Learn from one served step of the group. A time that is not positive and finite is left out."""
        if not (np.isfinite(served_s) and served_s > 0):
            self.num_outliers += 1
            return
        self._start(served_s)
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
        if abs(gap) > OUTLIER_LOG:
            self.num_outliers += 1
            self._surprises += 1
            gap = float(np.copysign(OUTLIER_LOG, gap))
            if self._surprises >= SURPRISES_TO_RESTART:
                self._restart()
        else:
            self._surprises = 0
        self._learn(times, steps[slowest], slowest, total, gap)

    def _start(self, served_s: float) -> None:
        """The first step gives the unit in which the known g becomes the first guess."""
        if not self._unit:
            self._unit = served_s
            self._weights[2:] = np.diff(self._known_shared, prepend=0.0) / served_s

    def _learn(
        self, times: GroupTimes, step: RankStep, slowest: int, total: int, gap: float
    ) -> None:
        """Recursive least squares on relative time; then the factor of the slowest rank takes a small share."""
        predicted = times.step_time_s(np.zeros(len(times.scale)))
        curve_s = (
            float(step.curve.verify_time_s(step.batch_tokens))
            + float(drafting_s(step.curve, step.num_requests))
        ) * self.rank_scale[slowest]
        features = np.concatenate(
            [
                [curve_s, step.context_tokens / 1e6 * self._unit],
                _ramps(self._knots, total) * self._unit,
            ]
        )
        features /= predicted
        gain = self._covariance @ features
        gain /= FORGETTING + features @ gain
        self._weights += gain * np.expm1(gap)
        np.maximum(self._weights, 0.0, out=self._weights)
        self._covariance = (
            self._covariance - np.outer(gain, features @ self._covariance)
        ) / FORGETTING
        np.clip(self._covariance, -1e3, 1e3, out=self._covariance)
        if len(self.rank_scale) > 1:
            self._scale_rank(slowest, gap)

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


def drafting_s(curve: CostCurve, num_requests: npt.ArrayLike) -> Float64:
    """Seconds of drafting for these many requests, any shape; nothing for none."""
    requests = np.asarray(num_requests, np.float64)
    seconds = np.interp(requests, curve.draft_requests, curve.draft_time_s)
    return seconds * np.where(
        requests > 0, np.maximum(requests / curve.draft_requests[-1], 1.0), 0.0
    )


def split_profiles(
    alone: CostCurve, together: CostCurve, num_ranks: int
) -> tuple[CostCurve, SharedTime]:
    """f and g from two measurements of one group: one rank loaded and the others empty; all ranks loaded alike.

    alone(B) = f(B) + g(B) and together(B) = f(B) + g(nB), so g(nB) = g(B) + together(B) - alone(B): g is built up from
    small B in steps of a factor n. A constant in g cannot be seen and stays in f, where it does no harm.

    Returns:
        The curve of f, and g.
    """
    if num_ranks == 1:
        return alone, SharedTime.none()
    tokens, seconds = [0.0, 1.0], [0.0, 0.0]
    while tokens[-1] < together.batch_tokens[-1]:
        at = tokens[-1]
        more = float(together.verify_time_s(at) - alone.verify_time_s(at))
        tokens.append(at * num_ranks)
        seconds.append(seconds[-1] + max(more, 0.0))
    shared = SharedTime(np.array(tokens), np.array(seconds))
    own = np.maximum.accumulate(
        np.maximum(alone.step_time_s - shared(alone.batch_tokens), _ROUNDING)
    )
    return replace(alone, step_time_s=own), shared


def _ramps(knots: Float64, at: float) -> Float64:
    """How much of the first knot's cost (all of it) and of every further piece is spent at `at`: [K]."""
    pieces = np.clip((at - knots[:-1]) / np.diff(knots), 0.0, 1.0)
    return np.concatenate([[1.0], pieces])
