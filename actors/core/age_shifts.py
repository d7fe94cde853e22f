"""What confidences are off by at the beginning of an answer, and late in it.

Drafters are surer than they should be of text that has gone on for long, and less sure of first sentences: on the
bundled one, greedy, by a logit from the first rounds to those after the sixtieth, whatever the domain. Rounds of all
streams teach one filter for each span of ages; a stream's age is the number of its rounds that are over (C3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

AGES = np.array([4, 16, 64])  # rounds at which the next span begins
AGE_SPREAD = 0.5  # prior standard deviation of a span's shift, in logits
MEMORY_ROUNDS = 4096.0  # after which a share 1 / e of what was learned is left


class AgeShifts:
    """Shifts of the confidence logits by age, common to all streams."""

    def __init__(self) -> None:
        self._shift, self._information = np.zeros((2, len(AGES) + 1))

    def of(self, ages: Float64) -> Float64:
        """Shifts [N] in logits of streams of these ages [N]."""
        found: Float64 = self._shift[np.searchsorted(AGES, ages, side="right")]
        return found

    def learn(self, ages: Float64, residual: Float64, information: Float64) -> None:
        """Take in N rounds: labels less predictions, and p (1 - p), each summed over the slots seen, [N].

        What they are off by all alike is left to others.
        """
        residual = residual - information * (residual.sum() / (information.sum() + 1e-9))
        span, size = np.searchsorted(AGES, ages, side="right"), len(AGES) + 1
        self._information *= np.exp(-len(ages) / MEMORY_ROUNDS)
        self._information += np.bincount(span, information, size)
        self._shift += np.bincount(span, residual, size) / (self._information + AGE_SPREAD**-2)
