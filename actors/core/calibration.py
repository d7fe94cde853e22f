"""Sequential calibration of confidences by monotone curves (paper section 3.2.1 with more than a temperature), and how
true they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_BINS = 15
MAX_SHIFT = 12.0
HALVINGS = 30

# Where a curve may bend: at quantiles of the logits of rounds that reach the position.
NUM_KNOTS = 3
BEND_PENALTY = 3.0  # half of it, times a squared bend, is what bending costs in log likelihood
SLOPE_PENALTY = 1.0  # the same for a slope that is not 1
LEAST_SLOPE, MAX_SLOPE = 0.05, 10.0  # a curve never falls, and never becomes a step
SCORING_STEPS = 25
MAX_CHANGE = 1.0  # of a coefficient in one step
SLOPE_ROUNDING = 1e-3  # a stored slope of 0 may have been rounded below it


class CalibrationError(ValueError):
    """Calibration data or a map do not fit; the message names the field and the remedy."""


@dataclass(frozen=True)
class ConfidenceMap:
    """From the confidence logits of a block to calibrated confidences, by a curve for each position:

    c_k = sigmoid((z_k + shift_k) / T_k + sum_j bend_kj * max(z_k - knot_kj, 0)).

    Monotone at each position, and a function of z_k alone: what was lawful to decide by stays so (C3).
    """

    shifts: Float64  # [gamma]
    temperatures: Float64  # [gamma]
    knots: Float64  # [gamma, K] rising; K may be 0
    bends: Float64  # [gamma, K] by how much the slope changes there

    def __post_init__(self) -> None:
        if self.temperatures.ndim != 1 or self.shifts.shape != self.temperatures.shape:
            raise CalibrationError(
                f"temperatures: shape {self.temperatures.shape}, shifts: {self.shifts.shape}, want [gamma]; refit"
            )
        if not len(self.temperatures):
            raise CalibrationError("temperatures: none, want one for each position; refit")
        if not (np.isfinite(self.temperatures).all() and (self.temperatures > 0).all()):
            raise CalibrationError(
                f"temperatures: {self.temperatures}, want finite values above 0; refit"
            )
        if not np.isfinite(self.shifts).all():
            raise CalibrationError(f"shifts: {self.shifts}, want finite values; refit")
        if self.knots.shape != self.bends.shape or self.knots.shape[:1] != self.shifts.shape:
            raise CalibrationError(
                f"knots: shape {self.knots.shape}, bends: {self.bends.shape}, want [gamma, K] both; refit"
            )
        if not (np.isfinite(self.knots).all() and (np.diff(self.knots, axis=1) >= 0).all()):
            raise CalibrationError("knots: want finite values that do not fall; refit")
        slopes = 1 / self.temperatures[:, None] + self.bends.cumsum(axis=1)
        if not (np.isfinite(slopes).all() and (slopes >= -SLOPE_ROUNDING).all()):
            raise CalibrationError("bends: a curve falls, which would turn its order round; refit")

    @classmethod
    def straight(cls, shifts: Float64, temperatures: Float64) -> ConfidenceMap:
        """Shifts and temperatures only."""
        none = np.zeros((len(shifts), 0))
        return cls(shifts, temperatures, none, none)

    @classmethod
    def identity(cls, gamma: int) -> ConfidenceMap:
        return cls.straight(np.zeros(gamma), np.ones(gamma))

    def apply(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Calibrated conditional confidences, [N, gamma] float32, from confidence logits [N, gamma]."""
        if logits.ndim != 2 or logits.shape[1] != len(self.temperatures):
            raise CalibrationError(
                f"confidence logits: shape {logits.shape}, want [N, {len(self.temperatures)}]; "
                "the temperatures belong to another block length"
            )
        z = logits.astype(np.float64)
        bent = (np.maximum(z[:, :, None] - self.knots, 0.0) * self.bends).sum(axis=2)
        return _sigmoid((z + self.shifts) / self.temperatures + bent).astype(np.float32)


@dataclass(frozen=True)
class Fit:
    """A map, and the calibration error of the survivals before and after, on the rounds it was fitted to."""

    map: ConfidenceMap
    ece_before: Float64  # [gamma]
    ece_after: Float64  # [gamma]
    num_rounds: int


def fit(
    logits: npt.NDArray[np.floating],
    accepted_len: npt.NDArray[np.integer],
    num_bins: int = DEFAULT_BINS,
    num_knots: int = NUM_KNOTS,
) -> Fit:
    """Fit curves from left to right, each position on top of the ones before it, which stay.

    A curve is the likeliest for the labels, bends and slopes other than 1 costing something; then its shift makes the
    mean survival right. The paper has a temperature alone, the one of the least calibration error. That is what is
    wanted in the end, but near its minimum it is mostly the noise of its bins, and choosing by it fits noise.

    Args:
        logits: [N, gamma] confidence logits of rounds whose whole block was verified. Rounds cut short by a budget
            are censored and must be left out by the caller.
        accepted_len: [N] draft tokens accepted in each round; a round enters at every position, with label 0 after
            its first rejection, since the survival is a joint probability.
        num_knots: of each curve; 0 = a shift and a temperature.

    Raises:
        CalibrationError: shapes differ, no rounds, values that are no numbers, or lengths outside 0..gamma.
    """
    _check(logits, accepted_len)
    num_rounds, gamma = logits.shape
    shifts, temperatures = np.zeros((2, gamma))
    knots, bends = np.zeros((2, gamma, num_knots))
    survival = np.ones(num_rounds)
    for k in range(gamma):
        z, labels = logits[:, k].astype(np.float64), accepted_len > k
        reached = z[accepted_len >= k]
        quantiles = np.linspace(0, 1, num_knots + 2)[1:-1]
        knots[k] = np.quantile(reached if len(reached) else z, quantiles)
        slope, bends[k] = _likeliest_curve(z, survival, labels, knots[k])
        temperatures[k] = 1 / slope
        bent = np.maximum(z[:, None] - knots[k], 0.0) @ bends[k]
        offset = _balancing_offset(slope * z + bent, survival, labels)
        shifts[k] = offset * temperatures[k]
        survival = survival * _sigmoid(slope * z + bent + offset)
    found = ConfidenceMap(shifts, temperatures, knots, bends)
    before = survival_error(_sigmoid(logits.astype(np.float64)), accepted_len, num_bins)
    after = survival_error(found.apply(logits), accepted_len, num_bins)
    return Fit(found, before, after, num_rounds)


def survival_error(
    confidences: npt.NDArray[np.floating],
    accepted_len: npt.NDArray[np.integer],
    num_bins: int = DEFAULT_BINS,
) -> Float64:
    """Expected calibration error of the survivals at each position, [gamma], from confidences [N, gamma]."""
    survival = confidences.astype(np.float64).cumprod(axis=1)
    labels = accepted_len[:, None] > np.arange(confidences.shape[1])
    return np.array([ece(survival[:, k], labels[:, k], num_bins) for k in range(labels.shape[1])])


def ece(
    predicted: npt.NDArray[np.floating],
    happened: BoolArray,
    num_bins: int = DEFAULT_BINS,
) -> float:
    """Expected calibration error over equal-width bins: sum of bin share times |mean predicted - mean happened|."""
    bins = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    gap = np.bincount(bins, weights=predicted - happened, minlength=num_bins)
    return float(np.abs(gap).sum() / len(predicted))


def ece_floor(
    predicted: npt.NDArray[np.floating],
    rng: np.random.Generator,
    num_bins: int = DEFAULT_BINS,
    num_trials: int = 50,
) -> float:
    """The error `ece` would show on average if the predictions [N] were exactly right: the noise of so many labels."""
    trials = [
        ece(predicted, rng.random(len(predicted)) < predicted, num_bins) for _ in range(num_trials)
    ]
    return float(np.mean(trials))


def ece_floor_of_groups(
    predicted: npt.NDArray[np.floating],
    happened: BoolArray,
    groups: npt.NDArray[np.integer],
    num_bins: int = DEFAULT_BINS,
) -> float:
    """The same noise where predictions of one group (an answer) err alike: `groups` [N] from 0 tells which is whose.

    By the spread among the groups of each bin's summed gap, taken as normal: what so many other groups of the same
    kind would show of predictions that are right on average over all groups there are.
    """
    bins = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    num_groups = int(groups.max()) + 1
    gaps = np.bincount(groups * num_bins + bins, predicted - happened, num_groups * num_bins)
    spread = gaps.reshape(num_groups, num_bins).std(axis=0, ddof=1) * np.sqrt(num_groups)
    return float(np.sqrt(2 / np.pi) * spread.sum() / len(predicted))


def area_under_curve(predicted: npt.NDArray[np.floating], happened: BoolArray) -> float:
    """Probability that one that happened was predicted higher than one that did not, ties half; NaN without both."""
    num_true = int(happened.sum())
    num_false = len(happened) - num_true
    if not num_true or not num_false:
        return float("nan")
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum() - (counts - 1) / 2  # from 1; tied ones share theirs
    ranks = float(mean_rank[inverse][happened].sum())
    return (ranks - num_true * (num_true + 1) / 2) / (num_true * num_false)


def brier(predicted: npt.NDArray[np.floating], happened: BoolArray) -> float:
    """Mean squared distance of prediction and outcome."""
    return float(np.square(predicted.astype(np.float64) - happened).mean())


def _likeliest_curve(
    z: Float64, survival: Float64, labels: BoolArray, knots: Float64
) -> tuple[float, Float64]:
    """Slope and bends [K] under which labels ~ survival * c(z) are likeliest, by Fisher's scoring.

    The offset is fitted along and not returned: the caller balances it.
    """
    inputs = np.column_stack((np.ones(len(z)), z, np.maximum(z[:, None] - knots, 0.0)))
    centre = np.zeros(inputs.shape[1])
    centre[1] = 1.0
    penalty = np.array([1e-3, SLOPE_PENALTY, *[BEND_PENALTY] * len(knots)])
    found = centre.copy()
    for _ in range(SCORING_STEPS):
        c = _sigmoid(inputs @ found)
        refused = np.maximum(1 - survival * c, 1e-9)
        slope = (labels - survival * c) * (1 - c) / refused
        weight = survival * c * (1 - c) ** 2 / refused
        gain = inputs.T @ slope - penalty * (found - centre)
        curve = (inputs * weight[:, None]).T @ inputs + np.diag(penalty)
        found = found + np.clip(np.linalg.solve(curve, gain), -MAX_CHANGE, MAX_CHANGE)
    slopes = np.clip(found[1:].cumsum(), LEAST_SLOPE, MAX_SLOPE)
    return float(slopes[0]), np.diff(slopes)


def _balancing_offset(curve: Float64, survival: Float64, labels: BoolArray) -> float:
    """The offset at which sum(survival * sigmoid(curve + offset)) equals the number of labels, by halving."""
    wanted = float(labels.sum())
    low, high = -float(curve.max()) - MAX_SHIFT, MAX_SHIFT - float(curve.min())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float((survival * _sigmoid(curve + middle)).sum()) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sigmoid(x: Float64) -> Float64:
    result: Float64 = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result


def _check(logits: npt.NDArray[np.floating], accepted_len: npt.NDArray[np.integer]) -> None:
    if logits.ndim != 2 or not logits.size:
        raise CalibrationError(
            f"logits: shape {logits.shape}, want [N, gamma] with N > 0; collect rounds first"
        )
    if accepted_len.shape != logits.shape[:1]:
        raise CalibrationError(
            f"accepted_len: shape {accepted_len.shape}, want [{len(logits)}], one per round"
        )
    if not np.isfinite(logits).all():
        raise CalibrationError("logits: some are not finite; drop those rounds")
    if accepted_len.min() < 0 or accepted_len.max() > logits.shape[1]:
        raise CalibrationError(
            f"accepted_len: {accepted_len.min()}..{accepted_len.max()}, want 0..{logits.shape[1]}"
        )
