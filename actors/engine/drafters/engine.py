"""The serving form of the DSpark drafter: many requests a call, no loop over tokens."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.sampling import SamplingBatch
from actors.engine.base import DrafterSpec
from actors.engine.drafters.block import BlockDrafter, DraftedBlock
from actors.engine.drafters.context import ContextStore
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.packed_backbone import PackedBackbone, PaddedContext
from actors.engine.drafters.paged_drafts import PagedDrafts
from actors.engine.graphs import CudaGraphRecorder, Recorder
from actors.engine.weights import CheckpointError
from kernels import dispatch
from kernels.markov_sample import DraftSampling

log = logging.getLogger(__name__)
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DrafterOptions:
    """How to serve a drafter."""

    name: str
    gamma: int | None = None  # None: the block size it was trained with; fewer are cut from a block
    draft_top_k: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    captures: bool = True  # replay drafts from CUDA graphs, where there is CUDA


class DSparkEngine:
    """Implements `DrafterEngine` (actors.engine.base) for a DSpark checkpoint."""

    spec: DrafterSpec

    def __init__(
        self, model: DSparkModel, temperatures: Tensor, options: DrafterOptions, identity: str
    ) -> None:
        """Pack `model`; `temperatures` [block_size] divide the confidence logits (spec 4.1).

        Raises CheckpointError when `options.gamma` is not in 1..block_size.
        """
        config = model.config
        gamma = config.block_size if options.gamma is None else options.gamma
        if not 1 <= gamma <= config.block_size:
            raise CheckpointError(
                f"gamma={gamma} is outside 1..{config.block_size}, the block this drafter was "
                "trained for; choose one inside"
            )
        self.spec = DrafterSpec(
            name=options.name,
            gamma=gamma,
            draft_top_k=options.draft_top_k,
            feature_dim=config.feature_dim,
            tap_layer_ids=config.target_layer_ids,
            identity=identity,
        )
        self.device = torch.device(options.device)
        self.model = PackedBackbone(model, options.dtype, self.device)
        self.drafter = BlockDrafter(
            self.model, gamma, options.draft_top_k, temperatures[:gamma].to(self.device)
        )
        self.context = ContextStore(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            options.dtype,
            self.device,
        )
        self.paged: PagedDrafts | None = None
        if dispatch.implementation("attend_paged", self.device.type) == "triton":
            self.use_paged(CudaGraphRecorder() if options.captures else None)
        log.info("drafter: %s", dispatch.describe(self.device.type))

    def use_paged(self, recorder: Recorder | None) -> None:
        """Draft as a GPU does: contexts read where they lie, whole drafts captured by `recorder`."""
        self.paged = PagedDrafts(self.drafter, self.context, recorder)

    @torch.inference_mode()
    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        """Append the features, then draft for the rows that want a block (see `DrafterEngine`).

        Raises ValueError when the features are not `feature_dim` wide.
        """
        started = time.perf_counter()
        features = self._features(batch)
        rows = self.context.rows_of(batch.request_ids)
        generations = batch.generations.astype(np.int64)
        fresh = self.context.accept(rows, generations, batch.committed_lens.astype(np.int64))
        self._append(batch, features, rows, np.flatnonzero(fresh))
        # A block needs the context up to its anchor; an entry with features missing gets none.
        whole = self.context.lengths[rows] == batch.committed_lens - 1
        wanted = np.flatnonzero(fresh & batch.wants_block & whole)
        return self._draft(batch, rows[wanted], wanted, started) if len(wanted) else None

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests; unknown ids are fine."""
        self.context.close(request_ids)

    def open_requests(self) -> tuple[str, ...]:
        """Ids whose context is held."""
        return self.context.request_ids

    def _features(self, batch: CommitBatch) -> Tensor:
        """Return the message's features as a tensor [T, feature_dim]."""
        raw = batch.features
        if raw.ndim != 2 or raw.shape[1] != self.spec.feature_dim:
            raise ValueError(
                f"features have shape {raw.shape}, this drafter needs [*, {self.spec.feature_dim}]: "
                f"taps {self.spec.tap_layer_ids}; configure the target with these"
            )
        if raw.dtype == np.uint16:
            bits: npt.NDArray[np.int16] = np.ascontiguousarray(raw).view(np.int16)
            return torch.from_numpy(bits).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(raw))

    def _append(self, batch: CommitBatch, features: Tensor, rows: Int64, fresh: Int64) -> None:
        """Write the K/V of the context tokens that are new, in every layer."""
        first, cu_len = batch.first_positions.astype(np.int64), batch.cu_feature_len
        place = self.context.plan_append(rows, first, cu_len.astype(np.int64), fresh)
        if not len(place.feature_rows):
            return
        if len(place.feature_rows) < len(features):
            features = features[torch.from_numpy(place.feature_rows)]
        self.model.cover_positions(int(place.positions.max()))
        positions = torch.from_numpy(place.positions).to(self.device)
        self.context.write(place, *self.model.context_kv(features, positions))

    def _draft(
        self, batch: CommitBatch, rows: Int64, wanted: Int64, started: float
    ) -> ProposalBatch:
        """Draft for the `wanted` entries, whose contexts lie in `rows`."""
        block = self._block(
            rows,
            batch.anchor_token_ids[wanted].astype(np.int64),
            batch.committed_lens[wanted].astype(np.int64) - 1,
            batch.sampling.rows(wanted),
        )
        return ProposalBatch(
            drafter=self.spec.name,
            request_ids=tuple(batch.request_ids[i] for i in wanted),
            generations=batch.generations[wanted],
            committed_lens=batch.committed_lens[wanted],
            draft_token_ids=block.draft_token_ids.int().cpu().numpy(),
            confidences=block.confidences.cpu().numpy(),
            q_ids=block.q_ids.int().cpu().numpy(),
            q_probs=block.q_probs.cpu().numpy(),
            draft_time_s=time.perf_counter() - started,
        )

    def _block(
        self, rows: Int64, anchor_ids: Int64, anchors: Int64, sampling: SamplingBatch
    ) -> DraftedBlock:
        if self.paged is not None:
            return self.paged(rows, anchor_ids, anchors, sampling)
        self.model.cover_positions(int(anchors.max()) + self.model.config.block_size - 1)
        ids, positions = (torch.from_numpy(a).to(self.device) for a in (anchor_ids, anchors))
        padded = PaddedContext(*self.context.view(rows))
        return self.drafter(ids, positions, DraftSampling.of(sampling, self.device), padded)
