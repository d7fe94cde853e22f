"""Sequential temperature scaling of the confidence head on held-out blocks (spec 4.1)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NUM_BINS = 20
GRID = torch.logspace(-1, 1, 201, dtype=torch.float64)  # 0.1 .. 10, 1 in the middle


@dataclass(frozen=True)
class Calibration:
    """A temperature a slot, and the expected calibration error of the survival before and after."""

    temperatures: list[float]
    ece_before: list[float]
    ece_after: list[float]
    num_blocks: int

    def write(self, path: Path) -> None:
        """Write the fields as JSON."""
        fields = {
            "temperatures": [round(t, 4) for t in self.temperatures],
            "ece_before": [round(e, 4) for e in self.ece_before],
            "ece_after": [round(e, 4) for e in self.ece_after],
            "num_blocks": self.num_blocks,
            "num_bins": NUM_BINS,
        }
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def expected_calibration_error(predicted: Tensor, happened: Tensor, bins: int = NUM_BINS) -> float:
    """Mean gap of predicted and observed frequency over equal-width bins, weighted by their size.

    predicted [N] in [0, 1], happened [N] bool.
    """
    index = (predicted * bins).long().clamp_max(bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64)
    gap = predicted.double() - happened.double()
    sums.index_add_(0, index, gap)
    return float(sums.abs().sum() / len(predicted))


def fit_shift(logits: Tensor, labels: Tensor) -> float:
    """Return the constant that added to every logit [N, gamma] makes conditional acceptance right.

    A head trained on text it has seen is too sure of itself everywhere; temperatures cannot move a
    mean, so the head's own bias is corrected first: the sum of predicted probabilities over reached
    slots must equal the number accepted. `labels` [N, gamma] are prefix acceptances.
    """
    reached = torch.cat((torch.ones_like(labels[:, :1]), labels[:, :-1]), 1).bool()
    values, accepted = logits[reached].double(), labels[reached].double().sum()
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if float((values + middle).sigmoid().sum()) < float(accepted):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def survival_error(logits: Tensor, labels: Tensor, temperatures: list[float]) -> list[float]:
    """Return the calibration error of the survival at each slot, [gamma]."""
    scaled = logits.double() / torch.tensor(temperatures, dtype=torch.float64)
    survival = scaled.sigmoid().cumprod(1)
    slots = range(labels.shape[1])
    return [expected_calibration_error(survival[:, k], labels[:, k]) for k in slots]


def fit(logits: Tensor, labels: Tensor) -> Calibration:
    """Fit one temperature a slot, left to right, keeping the survivals of earlier slots fixed.

    `logits` [N, gamma] of confidence; `labels` [N, gamma] whether the whole prefix up to the slot was
    accepted. Every block enters at every slot and none was cut short by a scheduler, so the labels
    are those of the joint probability the product stands for.
    """
    before = survival_error(logits, labels, [1.0] * labels.shape[1])
    survival = torch.ones(len(logits), dtype=torch.float64)
    temperatures, after = [], []
    for k in range(labels.shape[1]):
        tried = [
            (
                expected_calibration_error(
                    survival * (logits[:, k].double() / t).sigmoid(), labels[:, k]
                ),
                i,
            )
            for i, t in enumerate(GRID)
        ]
        error, best = min(tried)
        temperature = float(GRID[best])
        survival = survival * (logits[:, k].double() / temperature).sigmoid()
        temperatures.append(temperature)
        after.append(error)
    return Calibration(temperatures, before, after, len(logits))
