"""Sequential temperature scaling of confidences (paper section 3.2.1), and how well calibrated they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

DEFAULT_GRID: Float64 = np.logspace(-1.0, 1.0, 41)
DEFAULT_BINS = 15


class CalibrationError(ValueError):
    """Calibration data or temperatures do not fit; the message names the field and the remedy."""


@dataclass(frozen=True)
class Temperatures:
    """One temperature for each position of a block: c_k = sigmoid(z_k / T_k)."""

    values: Float64  # [gamma]

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or not len(self.values):
            raise CalibrationError(f"temperatures: shape {self.values.shape}, want [gamma]; refit")
        if not (np.isfinite(self.values).all() and (self.values > 0).all()):
            raise CalibrationError(
                f"temperatures: {self.values}, want finite values above 0; refit"
            )

    @classmethod
    def identity(cls, gamma: int) -> Temperatures:
        return cls(np.ones(gamma))

    def apply(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """Calibrated conditional confidences, [N, gamma] float32, from confidence logits [N, gamma]."""
        if logits.ndim != 2 or logits.shape[1] != len(self.values):
            raise CalibrationError(
                f"confidence logits: shape {logits.shape}, want [N, {len(self.values)}]; "
                "the temperatures belong to another block length"
            )
        return _sigmoid(logits.astype(np.float64) / self.values).astype(np.float32)


@dataclass(frozen=True)
class Fit:
    """Temperatures and the calibration error of the survivals, before and after."""

    temperatures: Temperatures
    ece_before: Float64  # [gamma]
    ece_after: Float64  # [gamma]
    num_rounds: int


def fit(
    logits: npt.NDArray[np.floating],
    accepted_len: npt.NDArray[np.integer],
    grid: Float64 = DEFAULT_GRID,
    num_bins: int = DEFAULT_BINS,
) -> Fit:
    """Fit the temperatures from left to right, each minimising the ECE of the survival up to its position.

    Args:
        logits: [N, gamma] confidence logits of rounds whose whole block was verified. Rounds cut short by a budget
            are censored and must be left out by the caller.
        accepted_len: [N] draft tokens accepted in each round; a round enters at every position, with label 0 after
            its first rejection, since the survival is a joint probability.
        grid: temperatures tried; the first minimum wins.

    Raises:
        CalibrationError: shapes differ, no rounds, values that are no numbers, or lengths outside 0..gamma.
    """
    _check(logits, accepted_len)
    num_rounds, gamma = logits.shape
    raw = _sigmoid(logits.astype(np.float64)).cumprod(axis=1)
    labels = accepted_len[:, None] > np.arange(gamma)
    chosen, survival = np.ones(gamma), np.ones(num_rounds)
    before, after = np.zeros(gamma), np.zeros(gamma)
    for k in range(gamma):
        candidates = survival * _sigmoid(logits[:, k].astype(np.float64) / grid[:, None])
        errors = np.array([ece(candidate, labels[:, k], num_bins) for candidate in candidates])
        best = int(errors.argmin())
        chosen[k], survival = grid[best], candidates[best]
        before[k], after[k] = ece(raw[:, k], labels[:, k], num_bins), errors[best]
    return Fit(Temperatures(chosen), before, after, num_rounds)


def ece(
    predicted: npt.NDArray[np.floating],
    happened: npt.NDArray[np.bool_],
    num_bins: int = DEFAULT_BINS,
) -> float:
    """Expected calibration error over equal-width bins: sum of bin share times |mean predicted - mean happened|."""
    bins = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    gap = np.bincount(bins, weights=predicted - happened, minlength=num_bins)
    return float(np.abs(gap).sum() / len(predicted))


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
