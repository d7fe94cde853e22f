"""Ragged paged verification attention: online softmax over a tile's keys, splits joined in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device.launch import power_of_two, widens
from kernels.paged_attention import KEY_BLOCK, PagedLayout

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _product(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _key_slots(tables, row, key, known, table_width, BLOCK_SIZE: tl.constexpr):
    block = tl.load(tables + row * table_width + key // BLOCK_SIZE, mask=known, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def _fold(
    q, pos, begin, end, keys, values, tables, row, table_width, window,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOWED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [ROWS, DIM_BLOCK] over keys begin .. end - 1: maxima (base 2), sums, weighted values."""
    d = tl.arange(0, DIM_BLOCK)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < end
        at = (
            _key_slots(tables, row, key, known, table_width, BLOCK_SIZE)[:, None] * DIM + d[None, :]
        )
        # Blocks beyond a row's end belong to others or to nobody: what lies there is never loaded.
        inside = known[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        scores = _product(q, tl.trans(k), WIDEN) * LOG2_E
        seen = known[None, :] & (key[None, :] <= pos[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > pos[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A query that has seen no key yet stays at zero weight, whatever lies in its neighbours' keys.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + at, mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + _product(weights.to(v.dtype), v, WIDEN)
        top = higher
    return top, total, mixed


@triton.jit
def attend_kernel(
    queries, keys, values, tables, positions, tiles, out, part_mixed, part_stats,
    num_tokens, head_slots, table_width, window, split_keys,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile, one K/V head, one split; `head_slots` lie from one head to the next. Grid (tiles, KV_HEADS, splits)."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1)
    row = tl.load(tiles + tile * 3 + 2).to(tl.int64)
    m, d = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    live = m // GROUP < count
    token = (first + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    pos = tl.load(positions + token, mask=live, other=-1)
    end = tl.minimum(tl.max(pos, 0) + 1, (split + 1) * split_keys)
    begin = split * split_keys
    if WINDOWED:
        lowest = tl.min(tl.where(live, pos, 2147483647), 0) + 1 - window
        begin = tl.maximum(begin, tl.maximum(lowest, 0) // KEYS * KEYS)
    if begin < end:
        where = (token * (KV_HEADS * GROUP) + head)[:, None] * DIM + d[None, :]
        inside = live[:, None] & (d < DIM)[None, :]
        q = tl.load(queries + where, mask=inside, other=0.0)
        skipped = kv_head.to(tl.int64) * head_slots * DIM
        top, total, mixed = _fold(
            q, pos, begin, end, keys + skipped, values + skipped, tables, row, table_width,
            window, DIM, DIM_BLOCK, ROWS, KEYS, BLOCK_SIZE, WINDOWED, WIDEN,
        )  # fmt: skip
        if SPLIT:
            cell = (
                split.to(tl.int64) * num_tokens * (KV_HEADS * GROUP)
                + token * (KV_HEADS * GROUP)
                + head
            )
            tl.store(part_mixed + cell[:, None] * DIM + d[None, :], mixed, mask=inside)
            tl.store(part_stats + cell * 2, top, mask=live)
            tl.store(part_stats + cell * 2 + 1, total, mask=live)
        else:
            done = mixed / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + where, done.to(out.dtype.element_ty), mask=inside)


@triton.jit
def join_splits_kernel(
    part_mixed, part_stats, positions, out, num_tokens, window, split_keys,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Join the splits that a token sees, in their order. Grid (tokens, HEADS)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pos = tl.load(positions + token)
    d = tl.arange(0, DIM_BLOCK)
    first = 0
    if WINDOWED:
        first = tl.maximum(pos + 1 - window, 0) // split_keys
    top, total = float("-inf"), 0.0
    mixed = tl.zeros([DIM_BLOCK], tl.float32)
    for split in range(first, (pos + split_keys) // split_keys):
        cell = (tl.cast(split, tl.int64) * num_tokens + token) * HEADS + head
        own_top, own_total = tl.load(part_stats + cell * 2), tl.load(part_stats + cell * 2 + 1)
        higher = tl.maximum(top, own_top)
        shrink, own_shrink = tl.exp2(top - higher), tl.exp2(own_top - higher)
        own = tl.load(part_mixed + cell * DIM + d, mask=d < DIM, other=0.0)
        mixed = mixed * shrink + own * own_shrink
        total = total * shrink + own_total * own_shrink
        top = higher
    if pos >= 0:
        done = mixed / total
        tl.store(
            out + (token * HEADS + head) * DIM + d, done.to(out.dtype.element_ty), mask=d < DIM
        )


def attend_paged(queries: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
    """See `kernels.paged_attention.attend_paged`."""
    num_tokens, heads, dim = queries.shape
    kv_heads, shape = len(keys), layout.shape
    assert keys.stride() == values.stride() and keys.stride()[1:] == (dim, 1)
    group, is_split = heads // kv_heads, shape.num_splits > 1
    queries, out = queries.contiguous(), torch.zeros_like(queries)
    parts, stats = out, out
    if is_split:
        cells = (shape.num_splits, num_tokens, heads)
        parts = torch.empty((*cells, dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((*cells, 2), dtype=torch.float32, device=out.device)
    dim_block, windowed = power_of_two(dim, 16), layout.window > 0
    if not len(layout.tiles):
        return out.flatten(1)
    attend_kernel[len(layout.tiles), kv_heads, shape.num_splits](
        queries, keys, values, layout.block_tables, layout.positions, layout.tiles, out, parts, stats,
        num_tokens, keys.stride(0) // dim, layout.block_tables.shape[1], layout.window, shape.split_keys,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, DIM_BLOCK=dim_block,
        ROWS=shape.tile_rows, KEYS=KEY_BLOCK, BLOCK_SIZE=layout.block_size,
        WINDOWED=windowed, SPLIT=is_split, WIDEN=widens(keys.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    if is_split:
        join_splits_kernel[num_tokens, heads](
            parts, stats, layout.positions, out, num_tokens, layout.window, shape.split_keys,
            HEADS=heads, DIM=dim, DIM_BLOCK=dim_block, WINDOWED=windowed, num_warps=1,
        )  # fmt: skip
    return out.flatten(1)
