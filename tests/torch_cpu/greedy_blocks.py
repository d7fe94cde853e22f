"""Blocks of a drafter's torch model at temperature 0, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.drafters.model import BlockInputs, DraftModel, peak


@dataclass(frozen=True)
class GreedyBlocks:
    """Blocks drafted at temperature 0."""

    token_ids: Tensor  # [B, N, gamma] target ids
    confidence_logits: Tensor | None  # [B, N, gamma]; None without a confidence head
    peaks: Tensor  # [B, N, gamma] largest draft probability of the slot, at temperature 1


def draft_greedy(model: DraftModel, inputs: BlockInputs) -> GreedyBlocks:
    """Draft every block at temperature 0."""
    drafted: list[Tensor] = []
    peaks: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        drafted.append(model.draft_ids[logits.argmax(-1)])
        peaks.append(peak(logits))
        return drafted[-1]

    confidences = model.draft(inputs, choose)
    return GreedyBlocks(torch.stack(drafted, -1), confidences, torch.stack(peaks, -1))
