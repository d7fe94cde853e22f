"""How well step times are foretold: the error of recent predictions, each made before its step was learned from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SMOOTHING = 0.95
WORST_LOG = 2.0  # one stalled step says no more than this

_FALLBACK_RULES = frozenset({"cold", "flat_curve", "curve_mistrusted", "model_mistrusted"})


def is_fallback(rule: str) -> bool:
    """Whether a step's rule says that no budget was searched for: there is no curve, it says nothing of tokens, or
    predictions have parted from measurements."""
    return rule.removeprefix("local_") in _FALLBACK_RULES


@dataclass
class PredictionError:
    """Smoothed relative error of one rank's predictions.

    Attributes:
        num_steps: predictions that were compared.
    """

    num_steps: int = 0
    _mean_log: float = 0.0

    def note(self, predicted_s: float, served_s: float) -> None:
        """Compare one prediction with the step it was made for; times that are not positive are left out."""
        if predicted_s <= 0 or served_s <= 0:
            return
        gap = min(abs(float(np.log(served_s / predicted_s))), WORST_LOG)
        self.num_steps += 1
        # The first steps count alike; later ones fade.
        weight = max(1.0 - SMOOTHING, 1.0 / self.num_steps)
        self._mean_log += weight * (gap - self._mean_log)

    @property
    def value(self) -> float | None:
        """0.1: predictions are off by a tenth on average; None before the first one."""
        return float(np.expm1(self._mean_log)) if self.num_steps else None
