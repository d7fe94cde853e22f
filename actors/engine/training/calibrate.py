"""Calibrating a confidence head on held-out text: one table for each acceptance rule (spec 4).

Labels are uncensored: whole blocks are judged, no scheduler cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core.calibration import (
    ConfidenceMap,
    area_under_curve,
    brier,
    ece_floor,
    fit,
    survival_error,
)
from actors.engine.drafters.calibration import Table, write_tables
from actors.engine.training.replay import Blocks, pooled

NUM_BINS = 20  # as DeepSpec measures (spec 7.3)
FLOOR_SEED = 1


@dataclass(frozen=True)
class Calibrated:
    """A map fitted on all answers, and what fitting on one half of them does for the other half.

    All errors are of the survivals of the *unseen* half, [gamma]; `floor` is what a perfect head would show there.
    """

    map: ConfidenceMap
    half: ConfidenceMap
    raw: npt.NDArray[np.float64]
    calibrated: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]
    num_rounds: int

    def measured(self) -> dict[str, Any]:
        """Return what to write beside the map."""
        return {
            "ece_raw": rounded(self.raw),
            "ece_unseen": rounded(self.calibrated),
            "ece_floor": rounded(self.floor),
            "num_rounds": self.num_rounds,
            "num_bins": NUM_BINS,
        }


def calibrated(every: Sequence[Blocks]) -> Calibrated:
    """Fit on every second answer, measure on the others, then fit what is to be used on all."""
    half = fit(*pooled(every[::2])).map
    logits, accepted = pooled(every[1::2])
    confidences = half.apply(logits)
    floor_rng = np.random.default_rng(FLOOR_SEED)
    survival = confidences.astype(np.float64).cumprod(axis=1)
    raw = ConfidenceMap.identity(logits.shape[1]).apply(logits)
    whole = fit(*pooled(every))
    return Calibrated(
        whole.map,
        half,
        survival_error(raw, accepted, NUM_BINS),
        survival_error(confidences, accepted, NUM_BINS),
        np.array([ece_floor(column, floor_rng, NUM_BINS) for column in survival.T]),
        whole.num_rounds,
    )


def discrimination(
    confidences: npt.NDArray[np.floating], accepted: npt.NDArray[np.int64]
) -> dict[str, list[float]]:
    """Return area under the curve and Brier score of the survivals, [gamma] each."""
    survival = confidences.astype(np.float64).cumprod(axis=1)
    labels = accepted[:, None] > np.arange(survival.shape[1])
    slots = range(survival.shape[1])
    return {
        "auc": rounded([area_under_curve(survival[:, k], labels[:, k]) for k in slots]),
        "brier": rounded([brier(survival[:, k], labels[:, k]) for k in slots]),
    }


def calibrate_drafter(
    drafter_dir: Path, target_dir: Path, by_rule: dict[tuple[str, float], Sequence[Blocks]]
) -> dict[str, Calibrated]:
    """Write `calibration.json` with a table for each (rule, temperature); return what was found by rule.

    Raises CalibrationError when there are no whole rounds for one of them.
    """
    found, tables = {}, []
    for (rule, temperature), every in by_rule.items():
        found[rule] = calibrated(every)
        tables.append((Table(rule, temperature, found[rule].map), found[rule].measured()))
    write_tables(drafter_dir, target_dir, tables)
    return found


def rounded(values: Sequence[float] | npt.NDArray[np.float64], digits: int = 4) -> list[float]:
    """Return plain numbers for JSON."""
    return [round(float(v), digits) for v in values]
