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
    ece_floor_of_groups,
    fit,
    survival_error,
)
from actors.engine.drafters.calibration import Table, write_tables
from actors.engine.training.replay import Blocks, pooled

NUM_BINS = 20  # as DeepSpec measures (spec 7.3)
FLOOR_SEED = 1
NUM_FOLDS = 4


@dataclass(frozen=True)
class Calibrated:
    """A map fitted on all answers, and what such maps do for answers they were not fitted on.

    Attributes:
        unseen: [N, gamma] confidences of every round, by a map fitted without the quarter of the answers it is in.
        raw, calibrated: [gamma] calibration errors of the survivals, before and of `unseen`.
        floor: [gamma] what a perfect head would show with as many independent labels.
        floor_of_answers: [gamma] the same for labels of one answer that err alike, as they do.
        by_domain: `calibrated` on the rounds of each domain.
    """

    map: ConfidenceMap
    logits: npt.NDArray[np.float32]  # [N, gamma]
    unseen: npt.NDArray[np.float32]
    accepted: npt.NDArray[np.int64]  # [N]
    raw: npt.NDArray[np.float64]
    calibrated: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]
    floor_of_answers: npt.NDArray[np.float64]
    by_domain: dict[str, npt.NDArray[np.float64]]

    def measured(self) -> dict[str, Any]:
        """Return what to write beside the map."""
        return {
            "ece_raw": rounded(self.raw),
            "ece_unseen": rounded(self.calibrated),
            "ece_floor": rounded(self.floor),
            "ece_floor_answers": rounded(self.floor_of_answers),
            "ece_by_domain": {d: rounded(e) for d, e in self.by_domain.items()},
            "num_rounds": len(self.accepted),
            "num_bins": NUM_BINS,
        }


def calibrated(every: Sequence[Blocks]) -> Calibrated:
    """Fit on all answers; measure on each quarter of them what a fit to the other three does for it.

    Raises CalibrationError when a part has no whole rounds, ValueError for a single answer.
    """
    if len(every) < 2:
        raise ValueError("calibration needs at least two answers; generate more held-out text")
    folds = range(min(NUM_FOLDS, len(every)))
    ordered = [i for fold in folds for i in range(fold, len(every), len(folds))]
    parts, unseen = [], []
    for fold in folds:
        others = [blocks for i, blocks in enumerate(every) if i % len(folds) != fold]
        parts.append(pooled(every[fold :: len(folds)]))
        unseen.append(fit(*pooled(others)).map.apply(parts[-1][0]))
    logits, accepted = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    answers = np.concatenate([np.full(len(pooled([every[i]])[1]), i) for i in ordered])
    confidences = np.concatenate(unseen)
    domains = np.array([blocks.domain for blocks in every])[answers]
    return Calibrated(
        fit(*pooled(every)).map,
        logits,
        confidences,
        accepted,
        survival_error(ConfidenceMap.identity(logits.shape[1]).apply(logits), accepted, NUM_BINS),
        survival_error(confidences, accepted, NUM_BINS),
        *_floors(confidences, accepted, answers),
        {
            str(d): survival_error(confidences[domains == d], accepted[domains == d], NUM_BINS)
            for d in np.unique(domains)
        },
    )


def _floors(
    confidences: npt.NDArray[np.floating],
    accepted: npt.NDArray[np.int64],
    answers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The noise of the calibration error [gamma] with independent labels, and by the answers they are of."""
    rng = np.random.default_rng(FLOOR_SEED)
    survival = confidences.astype(np.float64).cumprod(axis=1)
    alike = [
        ece_floor_of_groups(column, accepted > k, answers, NUM_BINS)
        for k, column in enumerate(survival.T)
    ]
    return np.array([ece_floor(column, rng, NUM_BINS) for column in survival.T]), np.array(alike)


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
