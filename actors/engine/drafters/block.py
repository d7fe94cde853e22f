"""One block a request, from the anchors to drafted tokens and their confidences: what a GPU captures as one graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actors.engine.drafters.packed_backbone import Attend, PackedBackbone
from kernels.markov_sample import DraftSampling, sample_block


class DraftedBlock(NamedTuple):
    """What is proposed for N requests, on the drafter's device."""

    draft_token_ids: Tensor  # [N, gamma] int64
    confidences: Tensor  # [N, gamma] float32, calibrated
    q_ids: Tensor  # [N, gamma, draft_top_k] int64, -1 pads
    q_probs: Tensor  # [N, gamma, draft_top_k] float32

    def first(self, num: int) -> DraftedBlock:
        """Leave out the rows after `num`."""
        return DraftedBlock(*(t[:num] for t in self))


class BlockDrafter:
    """Backbone, Markov loop and confidence head (paper Eq. 2-8), in one call.

    Args:
        gamma: slots kept of each block.
        draft_top_k: support of the sparse q.
        temperatures: [gamma], divide the confidence logits (paper 3.2.1).
    """

    def __init__(
        self, model: PackedBackbone, gamma: int, draft_top_k: int, temperatures: Tensor
    ) -> None:
        self.model, self.gamma, self.draft_top_k = model, gamma, draft_top_k
        self.temperatures = temperatures

    def __call__(
        self, anchor_ids: Tensor, anchors: Tensor, sampling: DraftSampling, attend: Attend
    ) -> DraftedBlock:
        """Draft for anchor_ids at absolute positions anchors, both [N]."""
        model = self.model
        hidden = model.block(anchor_ids, anchors, attend)[:, : self.gamma]
        block = sample_block(
            model.head(hidden),
            model.markov,
            anchor_ids,
            anchors,
            sampling,
            self.draft_top_k,
            model.draft_ids,
        )
        logits = model.confidence_logits(hidden, block.markov_embeddings)
        if logits is None:  # no head: nothing is known, so nothing is trimmed for it
            confidences = torch.ones(hidden.shape[:2], device=hidden.device)
        else:
            confidences = torch.sigmoid(logits / self.temperatures)
        return DraftedBlock(block.draft_token_ids, confidences, block.q_ids, block.q_probs)
