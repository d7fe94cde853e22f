"""Sequential temperature scaling of confidences with a shift (paper section 3.2.1), and how true they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

DEFAULT_GRID: Float64 = np.logspace(-0.7, 1.0, 35)
DEFAULT_BINS = 15
MAX_SHIFT = 12.0
HALVINGS = 30


class CalibrationError(ValueError):
    """Calibration data or a map do not fit; the message names the field and the remedy."""


@dataclass(frozen=True)
class ConfidenceMap:
    """From the confidence logits of a block to calibrated confidences: c_k = sigmoid((z_k + shift_k) / T_k).

    Monotone at each position, and a function of z_k alone: what was lawful to decide by stays so (C3).
    """

    shifts: Float64  # [gamma]
    temperatures: Float64  # [gamma]

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

    @classmethod
    def identity(cls, gamma: int) -> ConfidenceMap:
        return cls(np.zeros(gamma), np.ones(gamma))

    def apply(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Calibrated conditional confidences, [N, gamma] float32, from confidence logits [N, gamma]."""
        if logits.ndim != 2 or logits.shape[1] != len(self.temperatures):
            raise CalibrationError(
                f"confidence logits: shape {logits.shape}, want [N, {len(self.temperatures)}]; "
                "the temperatures belong to another block length"
            )
        scaled = (logits.astype(np.float64) + self.shifts) / self.temperatures
        return _sigmoid(scaled).astype(np.float32)


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
    grid: Float64 = DEFAULT_GRID,
    num_bins: int = DEFAULT_BINS,
) -> Fit:
    """Fit shifts and temperatures from left to right, each position on top of the ones before it, which stay.

    At each temperature of the grid the shift makes the mean survival right; the temperature that makes the labels
    likeliest is taken. The paper minimises the calibration error instead. That is what is wanted in the end, but near
    its minimum it is mostly the noise of its bins, and choosing by it fits noise.

    Args:
        logits: [N, gamma] confidence logits of rounds whose whole block was verified. Rounds cut short by a budget
            are censored and must be left out by the caller.
        accepted_len: [N] draft tokens accepted in each round; a round enters at every position, with label 0 after
            its first rejection, since the survival is a joint probability.
        grid: temperatures tried; the first maximum wins.

    Raises:
        CalibrationError: shapes differ, no rounds, values that are no numbers, or lengths outside 0..gamma.
    """
    _check(logits, accepted_len)
    num_rounds, gamma = logits.shape
    labels = accepted_len[:, None] > np.arange(gamma)
    temperatures, shifts, survival = np.ones(gamma), np.zeros(gamma), np.ones(num_rounds)
    for k in range(gamma):
        z = logits[:, k].astype(np.float64)
        tried = []
        for temperature in grid:
            shift = _balancing_shift(z, survival, labels[:, k], temperature)
            candidate = survival * _sigmoid((z + shift) / temperature)
            tried.append((_log_likelihood(candidate, labels[:, k]), shift, candidate))
        best = int(np.argmax([likelihood for likelihood, _, _ in tried]))
        temperatures[k], (_, shifts[k], survival) = grid[best], tried[best]
    found = ConfidenceMap(shifts, temperatures)
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


def _balancing_shift(z: Float64, survival: Float64, labels: BoolArray, temperature: float) -> float:
    """The shift at which sum(survival * sigmoid((z + shift) / temperature)) equals the number of labels, by halving."""
    wanted = float(labels.sum())
    low, high = -float(z.max()) - MAX_SHIFT * temperature, MAX_SHIFT * temperature - float(z.min())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float((survival * _sigmoid((z + middle) / temperature)).sum()) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _log_likelihood(predicted: Float64, labels: BoolArray) -> float:
    clipped = np.clip(predicted, 1e-9, 1 - 1e-9)
    return float(np.log(np.where(labels, clipped, 1 - clipped)).sum())


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
