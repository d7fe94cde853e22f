"""The target's forward on a GPU: any step as it comes, steps of rounds replayed from captured graphs.

A captured forward has fixed shapes: a tier of tokens (see `actors.core.token_tiers`), as many rows, block tables for
the longest request. Tokens that only pad it have slot -1 and belong to no tile, so they leave no trace; the kernels
take what varies (tiles, positions, tables) from tensors that are filled before each replay.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import StepPlan
from actors.core.token_tiers import tier_for, token_tiers
from actors.engine.graphs import Recorded, Recorder
from actors.engine.target_model import StepInputs, TargetModel
from kernels.kv_store import KvStore
from kernels.paged_attention import PagedLayout, PagedShape, cut_tiles, paged_layout
from kernels.ragged_attention import ragged_rows

log = logging.getLogger(__name__)
Outputs = tuple[Tensor, Tensor | None]  # hidden, taps
MOST_CAPTURED_TOKENS = 512


class StaticInputs:
    """The inputs of a captured step of `tier` tokens; `fill` is all that happens between replays."""

    def __init__(
        self,
        tier: int,
        shape: PagedShape,
        heads_per_kv: int,
        windows: frozenset[int],
        store: KvStore,
        max_model_len: int,
    ) -> None:
        device = store.pool(0).device
        self._tile_tokens = shape.tile_rows // heads_per_kv
        self.tier = tier
        max_blocks = -(-max_model_len // store.block_size)
        # As many tiles and rows as tokens: one token a row is the least favourable cut.
        self._tiles = torch.zeros((tier, 3), dtype=torch.int32, device=device)
        self._seen = torch.full((tier,), -1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((tier, max_blocks), dtype=torch.int32, device=device)
        self._ids = torch.zeros(tier, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tier, dtype=torch.int64, device=device)
        self._slots = torch.full((tier,), -1, dtype=torch.int64, device=device)
        layout = PagedLayout(self._tiles, self._seen, self._tables, store.block_size, shape)
        layouts = {window: replace(layout, window=window) for window in windows}
        self.inputs = StepInputs(self._ids, self._positions, self._slots, layouts)

    def fill(self, plan: StepPlan) -> None:
        """Take over a plan of at most `tier` tokens."""
        num, tier = plan.batch_tokens, self.tier
        cu_query_len = plan.cu_query_len.astype(np.int64)

        def padded(values: npt.NDArray[np.integer], padding: int) -> Tensor:
            row = np.full(tier, padding, np.int64)
            row[:num] = values
            return torch.from_numpy(row)

        self._ids.copy_(padded(plan.token_ids, 0), non_blocking=True)
        self._positions.copy_(padded(plan.positions, 0), non_blocking=True)
        self._seen.copy_(padded(plan.positions, -1), non_blocking=True)
        self._slots.copy_(padded(plan.slot_mapping, -1), non_blocking=True)
        tiles = cut_tiles(cu_query_len, self._tile_tokens, num_tiles=tier)
        self._tiles.copy_(torch.from_numpy(tiles), non_blocking=True)
        rows, width = plan.block_tables.shape
        own = self._tables[:rows, :width]
        own.copy_(torch.from_numpy(np.ascontiguousarray(plan.block_tables)), non_blocking=True)


class PagedForward:
    """Runs the forward of step plans with the paged kernels.

    Args:
        recorder: captures decode steps; None computes every step as it comes.

    Attributes:
        num_uncaptured: steps that could have been replayed were there a recorder.
    """

    def __init__(
        self,
        model: TargetModel,
        store: KvStore,
        tap_layer_ids: tuple[int, ...],
        max_model_len: int,
        recorder: Recorder | None,
    ) -> None:
        config = model.config
        self.model, self.store, self.taps = model, store, tap_layer_ids
        self.max_model_len, self._recorder = max_model_len, recorder
        self._heads_per_kv = config.num_heads // config.num_kv_heads
        self._windows = frozenset(config.windows)
        self._fixed = PagedShape.fixed(self._heads_per_kv, max_model_len)
        self._tiers = token_tiers(MOST_CAPTURED_TOKENS)
        self._captured: dict[int, tuple[StaticInputs, Recorded[Outputs]]] = {}
        self.num_replays = 0
        self.num_capture_failures = 0
        self.num_uncaptured = 0

    def __call__(self, plan: StepPlan) -> Outputs:
        """Hidden [B, hidden] and taps of a step; a replayed step's are overwritten by the next one."""
        tier = self.tier_of(plan)
        if tier is not None and self._recorder is not None:
            captured = self._captured.get(tier) or self._capture(tier, self._recorder)
            if captured is not None:
                inputs, recorded = captured
                inputs.fill(plan)
                recorded.replay()
                self.num_replays += 1
                hidden, taps = recorded.outputs
                num = plan.batch_tokens
                return hidden[:num], None if taps is None else taps[:num]
        self.num_uncaptured += tier is not None
        return self.model.forward(self.inputs(plan), self.store, self.taps)

    def tier_of(self, plan: StepPlan) -> int | None:
        """The tier a step is replayed in; None for a step with a prompt chunk, too large, or of unknown bound."""
        is_rounds = bool((np.diff(plan.cu_query_len) == 1 + plan.verify_len).all())
        if not plan.token_bound or not is_rounds or not plan.batch_tokens:
            return None
        assert plan.batch_tokens <= plan.token_bound, (
            f"{plan.batch_tokens} tokens, bound {plan.token_bound}"
        )
        return tier_for(plan.token_bound, self._tiers)

    def _capture(
        self, tier: int, recorder: Recorder
    ) -> tuple[StaticInputs, Recorded[Outputs]] | None:
        inputs = StaticInputs(
            tier, self._fixed, self._heads_per_kv, self._windows, self.store, self.max_model_len
        )
        try:
            recorded = recorder.record(
                lambda: self.model.forward(inputs.inputs, self.store, self.taps)
            )
        except RuntimeError:
            log.exception("a step of %d tokens could not be captured; steps run uncaptured", tier)
            self.num_capture_failures += 1
            self._recorder = None
            return None
        self._captured[tier] = inputs, recorded
        return self._captured[tier]

    def inputs(self, plan: StepPlan) -> StepInputs:
        """An uncaptured step on the device."""
        device, kv_heads = self.model.device, self.model.config.num_kv_heads
        rows = ragged_rows(plan.cu_query_len, plan.positions, plan.context_len, plan.block_tables)
        longest = int(rows.kv_len.max())
        if self.model.numerics == "reproducible":
            shape = self._fixed.up_to(longest)
        else:
            query_len = np.diff(rows.cu_query_len)
            shape = PagedShape.fast(query_len, longest, self._heads_per_kv, kv_heads)
        layout = paged_layout(rows, shape, self._heads_per_kv, self.store.block_size, device)
        ids, positions, slots = (
            torch.from_numpy(a.astype(np.int64)).to(device)
            for a in (plan.token_ids, plan.positions, plan.slot_mapping)
        )
        layouts = {window: replace(layout, window=window) for window in self._windows}
        return StepInputs(ids, positions, slots, layouts)
