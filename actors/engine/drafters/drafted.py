"""What a drafter hands over for each request."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftedBlock(NamedTuple):
    """What is proposed for N requests, on the drafter's device."""

    draft_token_ids: Tensor  # [N, gamma] int64
    confidences: Tensor  # [N, gamma] float32, calibrated; without a head: the peak of each slot's base distribution
    q_ids: Tensor  # [N, gamma, draft_top_k] int64, -1 pads
    q_probs: Tensor  # [N, gamma, draft_top_k] float32
    draft_lens: Tensor | None = None  # [N] int64 slots that were drafted, fillers behind; None: all

    def first(self, num: int) -> DraftedBlock:
        """Leave out the rows after `num`."""
        return DraftedBlock(*(None if t is None else t[:num] for t in self))  # type: ignore[arg-type]
