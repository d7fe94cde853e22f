"""One block a request, from the anchors to drafted tokens and their confidences: what a GPU captures as one graph."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.heads import draft_left_to_right
from actors.engine.drafters.model import peak
from actors.engine.drafters.packed_backbone import Attend, PackedBackbone
from kernels.markov_sample import BlockSample, DraftSampling, sample_block
from kernels.slot_sample import SlotSampler


class DraftedBlock(NamedTuple):
    """What is proposed for N requests, on the drafter's device."""

    draft_token_ids: Tensor  # [N, gamma] int64
    confidences: Tensor  # [N, gamma] float32, calibrated; without a head: the peak of each slot's base distribution
    q_ids: Tensor  # [N, gamma, draft_top_k] int64, -1 pads
    q_probs: Tensor  # [N, gamma, draft_top_k] float32

    def first(self, num: int) -> DraftedBlock:
        """Leave out the rows after `num`."""
        return DraftedBlock(*(t[:num] for t in self))


class BlockDrafter:
    """Backbone, sequential head and confidence head (paper Eq. 2-8), in one call.

    Args:
        gamma: slots kept of each block.
        draft_top_k: support of the sparse q.
        tables: calibrate the confidence logits, for `gamma` slots (paper 3.2.1).
    """

    def __init__(
        self, model: PackedBackbone, gamma: int, draft_top_k: int, tables: ConfidenceTables
    ) -> None:
        self.model, self.gamma, self.draft_top_k = model, gamma, draft_top_k
        self.tables = tables

    def __call__(
        self, anchor_ids: Tensor, anchors: Tensor, sampling: DraftSampling, attend: Attend
    ) -> DraftedBlock:
        """Draft for anchor_ids at absolute positions anchors, both [N]."""
        model = self.model
        hidden = model.block(anchor_ids, anchors, attend)[:, : self.gamma]
        base = model.head(hidden)
        block = self._sample(base, hidden, anchor_ids, anchors, sampling)
        logits = model.confidence_logits(hidden, block.markov_embeddings)
        confidences = peak(base) if logits is None else self.tables.confidences(logits, sampling)
        return DraftedBlock(block.draft_token_ids, confidences, block.q_ids, block.q_probs)

    def _sample(
        self,
        base: Tensor,
        hidden: Tensor,
        anchor_ids: Tensor,
        anchors: Tensor,
        sampling: DraftSampling,
    ) -> BlockSample:
        """Draw the blocks from base logits [N, g, V'] and hidden [N, g, d]."""
        model, top_k = self.model, self.draft_top_k
        if model.sequential is None:
            return sample_block(
                base, model.markov, anchor_ids, anchors, sampling, top_k, model.draft_ids
            )
        slots = SlotSampler(anchors, sampling, self.gamma, top_k, model.draft_ids)
        seen = draft_left_to_right(model.sequential, base, hidden, anchor_ids, slots.draw)
        return slots.block()._replace(markov_embeddings=seen)
