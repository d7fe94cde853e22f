"""Left-to-right block sampling with the Markov bias: the public entry of the drafter engine.

sampling = DraftSampling.of(batch.sampling, device)
block = sample_block(base_logits, MarkovHead(w1, w2), anchors, anchor_positions, sampling, draft_top_k, d2t)
confidences = sigmoid(confidence_head(cat(hidden, block.markov_embeddings)))
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from kernels import dispatch
from kernels.block_reference import BlockSample, DraftSampling, MarkovHead

__all__ = ["BlockSample", "DraftSampling", "MarkovHead", "sample_block"]


def sample_block(
    base_logits: Tensor,
    markov: MarkovHead | None,
    anchors: Tensor,
    anchor_positions: Tensor,
    sampling: DraftSampling,
    draft_top_k: int,
    d2t: Tensor | None = None,
    draws: Tensor | None = None,
) -> BlockSample:
    """Draft ids, their sparse distributions and W1[x_{k-1}] for N requests; see `block_reference.sample_block`.

    Shapes: base_logits [N, gamma, V'], anchors and anchor_positions [N]; d2t [V'] holds target ids (not offsets).
    """
    op = dispatch.chosen("sample_block", base_logits.device.type)
    return cast(
        "BlockSample",
        op(base_logits, markov, anchors, anchor_positions, sampling, draft_top_k, d2t, draws),
    )
