"""One block a request, from the anchors to drafted tokens and their confidences: what a GPU captures as one graph."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.drafted import DraftedBlock
from actors.engine.drafters.heads import draft_left_to_right
from actors.engine.drafters.model import peak
from actors.engine.drafters.packed_backbone import Attend, BegunBlock, PackedBackbone
from actors.engine.drafters.stopped import draft_while_worth
from kernels.markov_sample import BlockSample, DraftSampling, sample_block
from kernels.slot_sample import SlotSampler


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

    @property
    def can_stop(self) -> bool:
        """Whether a slot's confidence is known before its token, and the token after it needs nothing else of it."""
        config = self.model.config
        return config.enable_confidence_head and self.model.sequential is None

    def __call__(
        self, anchor_ids: Tensor, anchors: Tensor, sampling: DraftSampling, attend: Attend
    ) -> DraftedBlock:
        """Draft for anchor_ids at absolute positions anchors, both [N]."""
        model = self.model
        hidden = model.block(anchor_ids, anchors, attend, self.gamma)
        base = model.head(hidden)
        block = self._sample(base, hidden, anchor_ids, anchors, sampling)
        logits = model.confidence_logits(hidden, block.markov_embeddings)
        confidences = peak(base) if logits is None else self.tables.confidences(logits, sampling)
        return DraftedBlock(block.draft_token_ids, confidences, block.q_ids, block.q_probs)

    def until(
        self,
        stops: Tensor,
        anchor_ids: Tensor,
        anchors: Tensor,
        sampling: DraftSampling,
        attend: Attend,
    ) -> DraftedBlock:
        """The same where the survival is at least stops [N], and fillers behind; sizes follow from what is drafted."""
        assert self.can_stop
        begun = self.model.begin(anchor_ids, anchors, attend)
        slots = _BegunSlots(self.model, begun, self.tables, sampling)
        return draft_while_worth(
            slots, self.model.markov, anchor_ids, anchors, sampling, stops, self.gamma,
            self.draft_top_k, self.model.draft_ids,
        )  # fmt: skip

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


class _BegunSlots:
    """The slots of a begun block, finished group by group: a `stopped.Slots`."""

    def __init__(
        self,
        model: PackedBackbone,
        begun: BegunBlock,
        tables: ConfidenceTables,
        sampling: DraftSampling,
    ) -> None:
        self._model, self._begun = model, begun
        self._tables, self._table = tables, tables.chosen(sampling)
        self._hidden = torch.empty_like(begun.x)

    def logits(self, rows: Tensor, start: int, end: int) -> Tensor:
        x, mixed = (part[rows, start:end].flatten(0, 1) for part in self._begun)
        hidden = self._model.finish(x, mixed).unflatten(0, (len(rows), end - start))
        self._hidden[rows, start:end] = hidden
        return self._model.head(hidden)

    def confidences(self, rows: Tensor, slot: int, previous: Tensor) -> Tensor:
        markov = self._model.markov
        embeddings = None if markov is None else markov.w1[previous]
        logits = self._model.confidence_logits(self._hidden[rows, slot], embeddings)
        assert logits is not None
        return self._tables.of_slot(slot, logits, self._table[rows])
