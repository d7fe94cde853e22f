"""Block sampling one slot at a time, for drafters whose next slot needs more of the last one than its token."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block_reference import BlockSample, DraftSampling, draft_uniforms
from kernels.markov_sample import sample_block


class SlotSampler:
    """Draws slot after slot of N blocks by the same law and with the same noise as `sample_block`.

    for each slot: token = sampler.draw(corrected_logits)
    block = sampler.block()
    """

    def __init__(
        self,
        anchor_positions: Tensor,
        sampling: DraftSampling,
        gamma: int,
        draft_top_k: int,
        d2t: Tensor | None = None,
    ) -> None:
        """anchor_positions [N]; d2t [V'] target id of each draft id, None when they are the same."""
        self._positions, self._sampling = anchor_positions, sampling
        self._draft_top_k, self._d2t = draft_top_k, d2t
        self._uniforms = draft_uniforms(sampling.noise_key, anchor_positions, gamma)
        self._slots: list[BlockSample] = []

    def draw(self, logits: Tensor) -> Tensor:
        """Return the target ids [N] of the next slot from its corrected logits [N, V']."""
        slot = len(self._slots)
        sampled = sample_block(
            logits[:, None],
            None,
            self._positions,  # the tokens before: read for a Markov bias only, and there is none here
            self._positions + slot,
            self._sampling,
            self._draft_top_k,
            self._d2t,
            self._uniforms[:, slot : slot + 1],
        )
        self._slots.append(sampled)
        return sampled.draft_token_ids[:, 0]

    def block(self) -> BlockSample:
        """Return all slots drawn so far; `markov_embeddings` is None, the caller knows what it fed."""
        ids, q_ids, q_probs, _ = zip(*self._slots, strict=True)
        return BlockSample(torch.cat(ids, 1), torch.cat(q_ids, 1), torch.cat(q_probs, 1), None)
