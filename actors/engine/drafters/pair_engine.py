"""The serving form of EAGLE-3 and MTP: contexts of verified pairs, blocks drafted as chains."""

from __future__ import annotations

import time
from copy import deepcopy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from actors.core.messages import CommitBatch, ProposalBatch
from actors.engine.drafters.confidence import OnlineConfidence, peak_bins
from actors.engine.drafters.context import Append, ContextStore
from actors.engine.drafters.context_engine import ContextEngine
from actors.engine.drafters.model import peak
from actors.engine.drafters.pairs import PairContext, PairModel
from actors.engine.drafters.protocol import (
    DrafterOptions,
    drafter_spec,
    next_token_ids,
    proposal_batch,
)
from actors.engine.packed_linear import Linear
from kernels.block_reference import BlockSample, DraftSampling
from kernels.slot_sample import SlotSampler

Int64 = npt.NDArray[np.int64]


class PairEngine(ContextEngine):
    """Implements `DrafterEngine` (actors.engine.base) for a drafter over pairs.

    The context of a request holds the pairs of its committed tokens, each from a feature the target computed and the
    token after it; a chain's own guesses live in its `PairContext` alone and are gone with it.
    """

    def __init__(self, model: PairModel, options: DrafterOptions, identity: str) -> None:
        """Pack a copy of `model`. Raises CheckpointError when `options.gamma` is not in 1..block_size."""
        config = model.config
        self.spec = drafter_spec(config, options, identity)
        self.device, self.dtype = torch.device(options.device), options.dtype
        self.model = packed_copy(model, options.dtype, self.device)
        self.online = OnlineConfidence(self.spec.gamma)
        self.context = ContextStore(
            1, config.num_key_value_heads, config.head_dim, options.dtype, self.device
        )

    @torch.inference_mode()
    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        """Append the verified pairs, then draft for the rows that want a block (see `DrafterEngine`).

        Raises ValueError when the features are not `feature_dim` wide.
        """
        started = time.perf_counter()
        features, rows, place, can_draft = self.take(batch)
        self._append(place, features, next_token_ids(batch))
        # A chain starts at the pair before the anchor: its feature must be in this very message.
        cu_len = batch.cu_feature_len
        wanted = np.flatnonzero(can_draft & (np.diff(cu_len) > 0))
        if not len(wanted):
            return None
        last = features[torch.from_numpy(cu_len[1:][wanted].astype(np.int64) - 1)]
        block, peaks = self._draft(batch, rows[wanted], wanted, last)
        confidences = self.online.propose(batch, wanted, peak_bins(peaks.cpu().numpy()))
        return proposal_batch(self.spec, batch, wanted, block, confidences, started)

    def _append(self, place: Append, features: Tensor, next_ids: npt.NDArray[np.int32]) -> None:
        """Write the K/V of the pairs that are new."""
        if not len(place.feature_rows):
            return
        chosen = torch.from_numpy(place.feature_rows)
        tokens = torch.from_numpy(next_ids).long()[chosen].to(self.device)
        positions = torch.from_numpy(place.positions).to(self.device)
        taps = features[chosen].to(self.device, self.dtype)
        keys, values = self.model.pair_keys_values(taps, tokens, positions)
        self.context.write(place, keys[None], values[None])

    def _draft(
        self, batch: CommitBatch, rows: Int64, wanted: Int64, last: Tensor
    ) -> tuple[BlockSample, Tensor]:
        """Return the blocks of the `wanted` entries, and how peaked each slot's distribution was, [n, gamma].

        `rows` hold their contexts; `last` [n, feature_dim] are the features before their anchors.
        """
        model, spec = self.model, self.spec
        anchor_ids = torch.from_numpy(batch.anchor_token_ids[wanted]).long().to(self.device)
        anchors = torch.from_numpy(batch.committed_lens[wanted]).long().to(self.device) - 1
        keys, values, beyond = self.context.view(rows)
        mask = torch.zeros(beyond.shape, device=self.device).masked_fill_(beyond, float("-inf"))
        context = PairContext(keys[0], values[0], mask[:, None])
        slots = SlotSampler(
            anchors,
            DraftSampling.of(batch.sampling.rows(wanted), self.device),
            spec.gamma,
            spec.draft_top_k,
            model.draft_ids if model.config.reduced else None,
        )
        peaks: list[Tensor] = []

        def choose(_slot: int, hidden: Tensor) -> Tensor:
            logits = model.base_logits(hidden[:, 0])
            peaks.append(peak(logits))
            return slots.draw(logits)[:, None]

        first = model.first_hidden(last.to(self.device, self.dtype))[:, None]
        model.chain(first, anchor_ids[:, None], anchors[:, None], context, spec.gamma, choose)
        return slots.block(), torch.stack(peaks, 1)


class _PackedLinear(nn.Module):
    """A linear layer in the layout this machine multiplies fastest."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._linear = Linear(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


def packed_copy(model: PairModel, dtype: torch.dtype, device: torch.device) -> PairModel:
    """Return the same model for serving: its dtype and device, every weight laid out once."""
    copy = deepcopy(model).to(device, dtype).requires_grad_(False)
    for module in list(copy.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _PackedLinear(child.weight.detach()))
    copy.project_head = _PackedLinear(copy.head)
    return copy
