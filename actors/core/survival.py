"""From confidences to prefix survivals (paper section 3.2)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def survivals(confidences: Float32, has_proposal: npt.NDArray[np.bool_] | None = None) -> Float32:
    """a_k = product of c_1..c_k for every request.

    Args:
        confidences: [R, gamma] calibrated conditional acceptance. A value that is no number counts as 0: a slot
            nothing is known about is not worth verifying.
        has_proposal: [R]; a row without a proposal survives nowhere. None means all have one.

    Returns:
        [R, gamma] float32 in [0, 1], never increasing along a row (so that any threshold cuts a prefix).
    """
    clean = np.where(np.isnan(confidences), 0.0, np.clip(confidences, 0.0, 1.0)).astype(np.float32)
    product: Float32 = np.cumprod(clean, axis=1, dtype=np.float32)
    if has_proposal is not None:
        product[~has_proposal] = 0.0
    return product


def expected_committed(survival: Float32) -> float:
    """Tokens all requests commit in expectation when every slot is verified, the target's own token included."""
    return float(len(survival) + survival.sum(dtype=np.float64))
