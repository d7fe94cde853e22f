"""What the serving engines share: how a drafter is served, its spec, and the messages in and out."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.messages import CommitBatch, Float32, Int32, ProposalBatch
from actors.engine.base import DrafterSpec
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.drafted import DraftedBlock
from actors.engine.weights import CheckpointError
from kernels.markov_sample import BlockSample


@dataclass(frozen=True)
class DrafterOptions:
    """How to serve a drafter."""

    name: str
    gamma: int | None = None  # None: the block size it was trained with; fewer are cut from a block
    draft_top_k: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    captures: bool = True  # replay drafts from CUDA graphs, where there is CUDA


def drafter_spec(config: DrafterConfig, options: DrafterOptions, identity: str) -> DrafterSpec:
    """Return the spec of a drafter; CheckpointError when `options.gamma` is not in 1..block_size."""
    gamma = config.block_size if options.gamma is None else options.gamma
    if not 1 <= gamma <= config.block_size:
        raise CheckpointError(
            f"gamma={gamma} is outside 1..{config.block_size}, the block this drafter was "
            "trained for; choose one inside (drafter.gamma)"
        )
    return DrafterSpec(
        name=options.name,
        gamma=gamma,
        draft_top_k=options.draft_top_k,
        feature_dim=config.feature_dim,
        tap_layer_ids=config.target_layer_ids,
        identity=identity,
    )


def commit_features(batch: CommitBatch, spec: DrafterSpec) -> Tensor:
    """Return the message's features [T, feature_dim]; ValueError when they are not that wide."""
    raw = batch.features
    if raw.ndim != 2 or raw.shape[1] != spec.feature_dim:
        raise ValueError(
            f"features have shape {raw.shape}, this drafter needs [*, {spec.feature_dim}]: "
            f"taps {spec.tap_layer_ids}; configure the target with these"
        )
    if raw.dtype == np.uint16:
        bits: npt.NDArray[np.int16] = np.ascontiguousarray(raw).view(np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(raw))


def next_token_ids(batch: CommitBatch) -> npt.NDArray[np.int32]:
    """Return the token after each feature row, [T]: the next row's, and after the last one the anchor."""
    following = np.empty_like(batch.token_ids)
    following[:-1] = batch.token_ids[1:]
    has_rows = np.diff(batch.cu_feature_len) > 0
    following[batch.cu_feature_len[1:][has_rows] - 1] = batch.anchor_token_ids[has_rows]
    return following


def proposal_batch(
    spec: DrafterSpec,
    batch: CommitBatch,
    wanted: npt.NDArray[np.int64],
    block: BlockSample | DraftedBlock,
    confidences: Float32,
    started: float,
) -> ProposalBatch:
    """Return the answer to the `wanted` entries; `started` is when the engine was called (perf_counter)."""
    return ProposalBatch(
        drafter=spec.name,
        request_ids=tuple(batch.request_ids[i] for i in wanted.tolist()),
        generations=batch.generations[wanted],
        committed_lens=batch.committed_lens[wanted],
        draft_token_ids=block.draft_token_ids.int().cpu().numpy(),
        confidences=confidences,
        q_ids=block.q_ids.int().cpu().numpy(),
        q_probs=block.q_probs.cpu().numpy(),
        draft_time_s=time.perf_counter() - started,
        draft_lens=_draft_lens(block),
    )


def _draft_lens(block: BlockSample | DraftedBlock) -> Int32 | None:
    lens = block.draft_lens if isinstance(block, DraftedBlock) else None
    return None if lens is None else lens.int().cpu().numpy()
