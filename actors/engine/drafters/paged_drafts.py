"""Drafting on a GPU: contexts are read where they lie, and a whole draft is replayed from one captured graph.

A captured draft has fixed shapes: a tier of requests and a tier of context (see `actors.core.token_tiers`). Which rows
of the context it reads, and how far, it finds in tensors that are filled before each replay. Entries that only pad it
belong to no tile of the attention and write to a row that no request holds.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.sampling import RULE_GREEDY, SamplingBatch
from actors.core.token_tiers import context_tier, tier_for, token_tiers
from actors.engine.drafters.block import BlockDrafter
from actors.engine.drafters.context import ContextStore
from actors.engine.drafters.drafted import DraftedBlock
from actors.engine.graphs import Recorded, Recorder
from kernels import dispatch
from kernels.markov_sample import DraftSampling
from kernels.paged_attention import PagedLayout, PagedShape, cut_tiles

log = logging.getLogger(__name__)
Int64 = npt.NDArray[np.int64]
MOST_CAPTURED_REQUESTS = 128


class StaticDraft:
    """A draft of `tier` requests over fixed buffers: `fill`, then `run`, which is what a graph captures.

    A block's own keys and values are written behind its context, into columns that the next commit overwrites; its
    slots then see every key up to the last slot's, as one row of the paged attention.

    Args:
        span: most tokens of a context and its block.
        greedy: every request takes the argmax; the Markov loop then needs no support.
    """

    def __init__(
        self, drafter: BlockDrafter, context: ContextStore, tier: int, span: int, greedy: bool
    ) -> None:
        self._drafter, self._tier = drafter, tier
        config, device = drafter.model.config, context.keys.device
        self._spare_row, self._size = context.spare_row, config.block_size
        self._kv_heads = config.num_key_value_heads
        # As a graph does, hold the addresses of now: whoever moves them makes another `StaticDraft`.
        self._keys, self._values = context.keys.unbind(0), context.values.unbind(0)
        self._flat = [
            (_as_slots(k), _as_slots(v)) for k, v in zip(self._keys, self._values, strict=True)
        ]
        heads_per_kv = config.num_attention_heads // self._kv_heads
        shape = PagedShape.fast(np.full(tier, self._size), span, heads_per_kv, self._kv_heads)
        self._tile_tokens = shape.tile_rows // heads_per_kv
        num_tiles = tier * -(-self._size // self._tile_tokens)

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._tiles, self._seen = (
            zeros(n, *more, dtype=torch.int32)
            for n, more in ((num_tiles, (3,)), (tier * self._size, ()))
        )
        self._tables = zeros(tier, 1, dtype=torch.int32)
        self._layout = PagedLayout(
            self._tiles, self._seen, self._tables, context.num_columns, shape
        )
        self._ids, self._anchors = zeros(tier), zeros(tier)
        self._rows, self._columns = zeros(tier, 1), zeros(tier, self._size)
        reals = {"dtype": torch.float32}
        self._sampling = DraftSampling(
            zeros(tier, **reals), zeros(tier, **reals), zeros(tier), zeros(tier), zeros(tier),
            all_greedy=greedy, any_coupled=not greedy, any_truncated=not greedy,
        )  # fmt: skip
        none = np.zeros(0, np.int64)
        self.fill(none, none, none, none, SamplingBatch.of([]))

    def fill(
        self, rows: Int64, counts: Int64, anchor_ids: Int64, anchors: Int64, sampling: SamplingBatch
    ) -> None:
        """Take over at most `tier` requests: context row and tokens, anchor and its position, parameters; each [N]."""
        num, size = len(rows), self._size
        tiles = cut_tiles(np.arange(num + 1) * size, self._tile_tokens, num_tiles=len(self._tiles))
        self._tiles.copy_(torch.from_numpy(tiles), non_blocking=True)
        row = self._padded(rows, self._spare_row)
        count = self._padded(counts, 0)
        last = np.where(np.arange(self._tier) < num, count + size - 1, -1)
        for target, values in (
            (self._seen, np.repeat(last, size)),
            (self._tables, row[:, None] * self._kv_heads),
            (self._rows, row[:, None]),
            (self._columns, count[:, None] + np.arange(size)),
            (self._ids, self._padded(anchor_ids, 0)),
            (self._anchors, self._padded(anchors, 0)),
            (self._sampling.temperature, self._padded(sampling.temperature, 1)),
            (self._sampling.top_p, self._padded(sampling.top_p, 1)),
            (self._sampling.top_k, self._padded(sampling.top_k, 0)),
            (self._sampling.noise_key, self._padded(sampling.noise_key.view(np.int64), 0)),
            (self._sampling.rule, self._padded(sampling.rule, RULE_GREEDY)),
        ):
            target.copy_(torch.from_numpy(np.ascontiguousarray(values)), non_blocking=True)

    def run(self) -> DraftedBlock:
        """Draft from the buffers: no size and no choice depends on what they hold."""
        return self._drafter(self._ids, self._anchors, self._sampling, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys[layer][self._rows, :, self._columns] = k
        self._values[layer][self._rows, :, self._columns] = v
        count, size, heads, dim = q.shape
        attend = dispatch.chosen("attend_paged", q.device.type)
        scaled = (q * dim**-0.5).view(count * size, heads, dim)
        mixed: Tensor = attend(scaled, *self._flat[layer], self._layout)
        return mixed.view(count, size, heads * dim)

    def _padded(self, values: npt.NDArray[Any], padding: int) -> npt.NDArray[Any]:
        full = np.full(self._tier, padding, values.dtype)
        full[: len(values)] = values
        return full


def _as_slots(layer: Tensor) -> Tensor:
    """[rows, kv_heads, columns, hd] as [kv_heads, slots, hd]: row r's tokens are block r * kv_heads of `columns` slots.

    Heads overlap: a slot of one is, further on, a slot of the next. Nothing is copied.
    """
    rows, kv_heads, columns, dim = layer.shape
    slots = ((rows - 1) * kv_heads + 1) * columns
    return layer.as_strided((kv_heads, slots, dim), (columns * dim, dim, 1))


class PagedDrafts:
    """Drafts for any rows of a context store, from captured graphs where a recorder is given.

    Args:
        recorder: captures drafts; None computes each as it comes.
    """

    def __init__(
        self, drafter: BlockDrafter, context: ContextStore, recorder: Recorder | None
    ) -> None:
        self._drafter, self._context, self._recorder = drafter, context, recorder
        self._tiers = token_tiers(MOST_CAPTURED_REQUESTS)
        self._made: dict[
            tuple[int, int, bool], tuple[StaticDraft, Recorded[DraftedBlock] | None]
        ] = {}
        self._moves = (0, 0)
        self.num_replays = 0
        self.num_capture_failures = 0

    def __call__(
        self, rows: Int64, anchor_ids: Int64, anchors: Int64, sampling: SamplingBatch
    ) -> DraftedBlock:
        """Draft for the contexts in `rows` [N], N >= 1; a replayed draft is overwritten by the next one."""
        context, model = self._context, self._drafter.model
        counts = context.lengths[rows] - context.starts[rows]
        span = int(counts.max()) + model.config.block_size
        context.cover_columns(span - 1)
        model.cover_positions(int(anchors.max()) + model.config.block_size - 1)
        if self._moves != (context.num_moves, model.num_moves):
            self._made.clear()
            if self._recorder is not None:
                self._recorder.forget()
            self._moves = (context.num_moves, model.num_moves)
        greedy = bool((sampling.rule == RULE_GREEDY).all())
        tier = tier_for(len(rows), self._tiers)
        draft, recorded = self._draft_of(tier, len(rows), context_tier(span), greedy)
        draft.fill(rows, counts, anchor_ids, anchors, sampling)
        if recorded is None:
            return draft.run().first(len(rows))
        recorded.replay()
        self.num_replays += 1
        return recorded.outputs.first(len(rows))

    def _draft_of(
        self, tier: int | None, num_rows: int, span: int, greedy: bool
    ) -> tuple[StaticDraft, Recorded[DraftedBlock] | None]:
        if tier is None:  # more requests than any captured draft has
            return StaticDraft(self._drafter, self._context, num_rows, span, greedy), None
        key = (tier, span, greedy)
        if key not in self._made:
            draft = StaticDraft(self._drafter, self._context, *key)
            self._made[key] = draft, self._recorded(draft, tier)
        return self._made[key]

    def _recorded(self, draft: StaticDraft, tier: int) -> Recorded[DraftedBlock] | None:
        if self._recorder is None:
            return None
        try:
            return self._recorder.record(draft.run)
        except RuntimeError:
            log.exception(
                "a draft of %d requests could not be captured; drafts run uncaptured", tier
            )
            self.num_capture_failures += 1
            self._recorder = None
            return None
