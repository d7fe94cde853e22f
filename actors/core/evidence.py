"""What labels say the confidence logits are off by: sums by position and logit that fade, and the fit to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SHIFT_SPREAD = 1.0  # prior standard deviation of the common shift, in logits, at most
USUAL_SPREAD = 0.25  # and at least: what traffic of another kind is off by
LEAST_SPREAD = 0.05  # of a position around the common one, where labels show no more
NEWTON_STEPS = 2  # from the last fit on, so few are enough
MAX_LOGIT = 8.0
NUM_BINS = 64  # of logits, for the sums a fit rests on


class Evidence:
    """Labels seen by position and bin of the logit, [gamma, NUM_BINS] each: all that a fit needs, and it fades.

    Attributes:
        common: the shift all positions have in common, of the last fit.
        variance: of it.
    """

    def __init__(self, gamma: int) -> None:
        self.num_rounds = 0.0  # that still count
        self._sums = np.zeros((3, gamma, NUM_BINS))  # seen, accepted, sum of logits
        self.common = 0.0
        self.variance = USUAL_SPREAD**2
        self._own: Float64 = np.zeros(gamma)

    def add(self, num_rounds: float, sums: Float64, keep: float = 1.0) -> None:
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
        common, own = self.common, self._own
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
        self.common, self._own = common, own
        self.variance = 1 / (known + 1 / width)
        fitted: Float64 = np.clip(common + own, -MAX_LOGIT, MAX_LOGIT)
        return fitted


def sums_of(logits: Float64, seen: Mask, accepted: Mask) -> Float64:
    """What `Evidence` keeps of N rounds [N, gamma]: slots seen, accepted, and their logits summed."""
    gamma = logits.shape[1]
    rows, at = np.nonzero(seen)
    values = logits[rows, at]
    bins = ((values + MAX_LOGIT) * (NUM_BINS / (2 * MAX_LOGIT))).astype(np.int64)
    flat = at * NUM_BINS + np.clip(bins, 0, NUM_BINS - 1)
    size = gamma * NUM_BINS
    sums = [np.bincount(flat, weight, size) for weight in (None, accepted[rows, at], values)]
    return np.array(sums, np.float64).reshape(3, gamma, NUM_BINS)


def told_of(predicted: Float64, seen: Mask, accepted: Mask) -> tuple[Float64, Float64]:
    """Labels less predictions, and p (1 - p), each summed over the slots seen, [N]."""
    return (
        np.where(seen, accepted - predicted, 0.0).sum(axis=1),
        np.where(seen, predicted * (1 - predicted), 0.0).sum(axis=1),
    )


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
