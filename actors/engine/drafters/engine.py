"""The serving form of the DSpark drafter: many requests a call, no loop over tokens."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.messages import CommitBatch, Float32, ProposalBatch
from actors.core.sampling import SamplingBatch
from actors.engine.drafters.block import BlockDrafter
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.confidence import OnlineConfidence, peak_bins
from actors.engine.drafters.context import Append, ContextStore
from actors.engine.drafters.context_engine import ContextEngine
from actors.engine.drafters.drafted import DraftedBlock
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.packed_backbone import PackedBackbone, PaddedContext
from actors.engine.drafters.paged_drafts import PagedDrafts
from actors.engine.drafters.protocol import (
    DrafterOptions,
    drafter_spec,
    proposal_batch,
)
from actors.engine.graphs import CudaGraphRecorder, Recorder
from kernels import dispatch
from kernels.markov_sample import DraftSampling

log = logging.getLogger(__name__)
Int64 = npt.NDArray[np.int64]


class DSparkEngine(ContextEngine):
    """Implements `DrafterEngine` (actors.engine.base) for a DSpark checkpoint."""

    def __init__(
        self,
        model: DSparkModel,
        tables: ConfidenceTables,
        options: DrafterOptions,
        identity: str,
    ) -> None:
        """Pack `model`; `tables` calibrate the confidence logits of its block_size slots (spec 4.1).

        Raises CheckpointError when `options.gamma` is not in 1..block_size.
        """
        config = model.config
        self.spec = replace(
            drafter_spec(config, options, identity), num_refused_calibrations=tables.num_refused
        )
        gamma = self.spec.gamma
        self.online = OnlineConfidence(gamma)
        self.device = torch.device(options.device)
        self.model = PackedBackbone(model, options.dtype, self.device)
        self.drafter = BlockDrafter(
            self.model, gamma, options.draft_top_k, tables.fitting(gamma, self.device)
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
        features, rows, place, can_draft = self.take(batch)
        self._append(place, features)
        wanted = np.flatnonzero(can_draft)
        return self._draft(batch, rows[wanted], wanted, started) if len(wanted) else None

    def _append(self, place: Append, features: Tensor) -> None:
        """Write the K/V of the context tokens that are new, in every layer."""
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
            batch.min_survivals[wanted],
        )
        confidences = block.confidences.cpu().numpy()
        if not self.model.config.enable_confidence_head:
            confidences = self.online.propose(batch, wanted, peak_bins(confidences))
        return proposal_batch(self.spec, batch, wanted, block, confidences, started)

    def _block(
        self,
        rows: Int64,
        anchor_ids: Int64,
        anchors: Int64,
        sampling: SamplingBatch,
        min_survivals: Float32,
    ) -> DraftedBlock:
        if self.paged is not None:  # what is replayed has one size: whole blocks
            return self.paged(rows, anchor_ids, anchors, sampling)
        self.model.cover_positions(int(anchors.max()) + self.model.config.block_size - 1)
        ids, positions = (torch.from_numpy(a).to(self.device) for a in (anchor_ids, anchors))
        padded = PaddedContext(*self.context.view(rows, self.model.config.block_size))
        own = DraftSampling.of(sampling, self.device)
        if self.drafter.can_stop and min_survivals.any():
            stops = torch.from_numpy(min_survivals).to(self.device)
            return self.drafter.until(stops, ids, positions, own, padded)
        return self.drafter(ids, positions, own, padded)
