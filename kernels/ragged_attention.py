"""Attention of a ragged step over paged K/V: rows of different query and context lengths in few batched products.

Rows of similar shape form a group, padded to the longest of it: decode and verification rows together, long prefill
chunks apart, so that neither pays for the other. One group is two `bmm` with a softmax in fp32 between them; in bf16
on CPU that is ten times faster than `scaled_dot_product_attention` at decode shapes. Grouped queries share a head's
keys by being more rows of the same product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.kv_store import KvStore
from kernels.row_mirror import MirrorStep, RowMirrors

Int = npt.NDArray[np.int64]

SHORT_QUERY = 8  # query lengths up to this one share a group
SHORT_CONTEXT = 512  # and contexts up to this one; then each fourfold range has a group of its own
# What keeps a row's bits independent of padding and of its neighbours, found by measurement. The softmax sums in
# vectors of 16; fp32 products of fewer than 16 rows, or over more than 192 keys at once, choose their own order, and so
# do bf16 products over more than 1024 keys.
CONTEXT_MULTIPLE = 32
FP32_MIN_ROWS = 16
FP32_KEY_TILE = 128
BF16_KEY_TILE = 1024


@dataclass(frozen=True)
class Tiling:
    """Paddings that make a row's result bitwise independent of the rest of the step; (1, 1, None) asks for none."""

    context_multiple: int = 1
    min_product_rows: int = 1
    key_tile: int | None = None  # keys summed at once in the second product

    @classmethod
    def of(cls, dtype: torch.dtype, *, reproducible: bool) -> Tiling:
        if not reproducible:
            return cls()
        if dtype == torch.float32:
            return cls(FP32_KEY_TILE, FP32_MIN_ROWS, FP32_KEY_TILE)
        return cls(CONTEXT_MULTIPLE, key_tile=BF16_KEY_TILE)


@dataclass(frozen=True)
class RaggedRows:
    """The rows of one step, on the host."""

    cu_query_len: Int  # [R + 1]
    positions: Int  # [B] absolute
    kv_len: Int  # [R] context and own query
    block_tables: Int  # [R, max_blocks]
    # [R] that tell rows apart from step to step; none: nothing is kept of them
    names: Sequence[str] = ()


@dataclass(frozen=True)
class AttentionGroup:
    """G rows padded to `query_len` queries and to one context length of S keys."""

    num_rows: int
    query_len: int
    # of K/V: what is kept of them, or of the G * S / block_size physical blocks what `KvStore.read` wants
    source: MirrorStep | Tensor
    query_rows: (
        Tensor | None
    )  # [G * query_len] rows of the flattened step; None: all of them, in order
    num_open: int  # first keys that every query of the group sees; 0 where windows hide them
    bias: Tensor  # [G, query_len, 1, S - num_open] zero or -inf, for the others


@dataclass(frozen=True)
class AttentionLayout:
    """How one step attends; the same for all layers."""

    groups: tuple[AttentionGroup, ...]
    output_rows: (
        Tensor | None
    )  # [B] rows of the groups' padded outputs, one after another; None: all, in order
    tiling: Tiling

    def done(self) -> None:
        """Every layer has attended: what is kept of this step may be used by the next."""
        for group in self.groups:
            if isinstance(group.source, MirrorStep):
                group.source.done()


def attention_layout(
    rows: RaggedRows,
    store: KvStore,
    num_groups_of_heads: int,
    tiling: Tiling,
    like: Tensor,
    window: int = 0,
    mirrors: RowMirrors | None = None,
) -> AttentionLayout:
    """Plan the attention of a step. Numpy on the host; `like` gives dtype and device of the bias.

    Args:
        num_groups_of_heads: query heads per K/V head.
        window: keys a token sees, its own included; 0: all. Blocks that a whole row no longer sees are not read.
        mirrors: of the store's layers with this window, on a CPU; None: every block is read in every step.
    """
    rows = _without_past(rows, store.block_size, tiling, window)
    query_len = np.diff(rows.cu_query_len)
    min_queries = ceil(tiling.min_product_rows / num_groups_of_heads)
    kinds = _shape_class(query_len, rows.kv_len)
    classes = np.unique(kinds).tolist()
    groups: list[AttentionGroup] = []
    output_rows = np.empty(len(rows.positions), np.int64)
    is_plain, offset = len(classes) == 1, 0
    for kind in classes:
        own = np.flatnonzero(kinds == kind)
        tables = _tables(rows, own, store.block_size, tiling)
        mirror = None
        if mirrors is not None and rows.names and query_len[own].max() <= SHORT_QUERY:
            mirror = _mirrored(rows, own, tables, mirrors, kind)
        if mirror is not None:
            own = own[mirror.order]
        width = max(int(query_len[own].max()), min_queries)
        is_plain = is_plain and bool((query_len == width).all() and (np.diff(own) == 1).all())
        slots = np.arange(width)
        is_real = slots < query_len[own][:, None]
        # A padded query repeats its row's first token: it sees a key, so no row of the softmax is empty.
        token_rows = rows.cu_query_len[own][:, None] + np.where(is_real, slots, 0)
        output_rows[token_rows[is_real]] = offset + np.flatnonzero(is_real)
        offset += is_real.size
        source = mirror or store.rows_of(torch.from_numpy(tables.reshape(-1)).to(like.device))
        num_keys = tables.shape[1] * store.block_size
        groups.append(_group(rows, token_rows, source, num_keys, like, is_plain, window))
    where = None if is_plain else torch.from_numpy(output_rows).to(like.device)
    return AttentionLayout(tuple(groups), where, tiling)


def _without_past(rows: RaggedRows, block_size: int, tiling: Tiling, window: int) -> RaggedRows:
    """The rows without the blocks before their windows, positions counted from there.

    Cut at multiples of what is summed at once, so that the grouping of a sum does not depend on where a row's queries
    begin: a token gets the same bits in any cut of its text.
    """
    first = rows.positions[rows.cu_query_len[:-1]]
    step = lcm(block_size, tiling.context_multiple, tiling.key_tile or 1)
    skipped = np.maximum(first + 1 - window, 0) // step * step
    if not window or not skipped.any():
        return rows
    row_of = np.repeat(np.arange(len(first)), np.diff(rows.cu_query_len))
    width = rows.block_tables.shape[1]
    at = np.minimum(skipped[:, None] // block_size + np.arange(width), width - 1)
    return replace(
        rows,
        positions=rows.positions - skipped[row_of],
        kv_len=rows.kv_len - skipped,
        block_tables=np.take_along_axis(rows.block_tables, at, 1),
    )


def _shape_class(query_len: Int, kv_len: Int) -> Int:
    """Rows with equal numbers are padded together."""
    long_query = np.ceil(np.log2(np.maximum(query_len, SHORT_QUERY) / SHORT_QUERY))
    long_context = np.ceil(np.log2(np.maximum(kv_len, SHORT_CONTEXT) / SHORT_CONTEXT) / 2)
    return (long_query * 64 + long_context).astype(np.int64)


def _tables(rows: RaggedRows, own: Int, block_size: int, tiling: Tiling) -> Int:
    """[G, S / block_size] the blocks of a group, padded with block 0 to what its longest row needs."""
    step = lcm(block_size, tiling.context_multiple) // block_size
    num_blocks = ceil(ceil(int(rows.kv_len[own].max()) / block_size) / step) * step
    blocks = np.zeros((len(own), num_blocks), np.int64)
    given = min(num_blocks, rows.block_tables.shape[1])
    blocks[:, :given] = rows.block_tables[own, :given]
    return blocks


def _mirrored(
    rows: RaggedRows, own: Int, tables: Int, mirrors: RowMirrors, kind: int
) -> MirrorStep | None:
    """The step's update of what is kept of a group's K/V."""
    mirror = mirrors.find(kind, tables.size * mirrors.block_size)
    if mirror is None:
        return None
    starts, counts = rows.cu_query_len[own], np.diff(rows.cu_query_len)[own]
    row = np.repeat(np.arange(len(own)), counts)
    token = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
    num_used = -(-rows.kv_len[own] // mirrors.block_size)
    names = [rows.names[i] for i in own.tolist()]
    return mirror.begin(names, tables, num_used, row, rows.positions[token])


def _group(
    rows: RaggedRows,
    token_rows: Int,
    source: MirrorStep | Tensor,
    num_keys: int,
    like: Tensor,
    is_plain: bool,
    window: int,
) -> AttentionGroup:
    positions = rows.positions[token_rows]
    queries = torch.from_numpy(positions).to(like.device)
    num_open = 0 if window else int(positions.min()) + 1
    key_positions = torch.arange(num_open, num_keys, device=like.device)
    is_hidden = key_positions > queries[:, :, None, None]
    if window:
        is_hidden |= key_positions <= queries[:, :, None, None] - window
    bias = torch.zeros(is_hidden.shape, dtype=like.dtype, device=like.device)
    return AttentionGroup(
        num_rows=len(token_rows),
        query_len=token_rows.shape[1],
        source=source,
        query_rows=None if is_plain else torch.from_numpy(token_rows.reshape(-1)).to(like.device),
        num_open=num_open,
        bias=bias.masked_fill_(is_hidden, float("-inf")),
    )


def attend(queries: Tensor, store: KvStore, layer: int, layout: AttentionLayout) -> Tensor:
    """Causal attention of the step's tokens to their rows' keys, their own included, [B, heads * head_dim].

    Args:
        queries: [B, heads, head_dim], rotated and scaled by head_dim ** -0.5. Keys and values of the step's own
            tokens are in the store already.
    """
    outputs = [_attend_group(queries, store, layer, g, layout.tiling) for g in layout.groups]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if layout.output_rows is None else joined.index_select(0, layout.output_rows)


def _attend_group(
    queries: Tensor, store: KvStore, layer: int, group: AttentionGroup, tiling: Tiling
) -> Tensor:
    if group.query_rows is not None:
        queries = queries.index_select(0, group.query_rows)
    rows, width, kv_heads, dim = group.num_rows, group.query_len, store.num_kv_heads, store.head_dim
    if isinstance(group.source, MirrorStep):
        # Row after row, in each head after head: [G, T, kv, shared, dim] -> [G * kv, T * shared, dim].
        keys, values = group.source.read(layer)
        there, back = (0, 2, 1, 3, 4), (0, 2, 1, 3, 4)
        parts, bias = (rows, kv_heads), group.bias[:, None]
    else:
        # Head after head, in each row after row: -> [kv * G, T * shared, dim].
        read = store.read(layer, group.source)
        keys, values = (x.view(kv_heads * rows, -1, dim) for x in read)
        there, back = (2, 0, 1, 3, 4), (1, 2, 0, 3, 4)
        parts, bias = (kv_heads, rows), group.bias
    grouped = queries.view(rows, width, kv_heads, -1, dim).permute(there)
    grouped = grouped.reshape(kv_heads * rows, -1, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2))  # [kv * G, T * shared, S]
    by_query = scores.view(*parts, width, -1, scores.shape[-1])
    by_query[..., group.num_open :].add_(bias)
    weights = torch.softmax(scores, -1)  # computed in fp32 and rounded once, in bf16 too
    mixed = _weighted_sum(weights, values, tiling.key_tile)
    return mixed.view(*parts, width, -1, dim).permute(back).reshape(rows * width, -1)


def _weighted_sum(weights: Tensor, values: Tensor, key_tile: int | None) -> Tensor:
    """weights [N, M, S] @ values [N, S, dim], summed tile by tile in order where a tile is given."""
    num, height, span = weights.shape
    if key_tile is None or span <= key_tile:
        return torch.bmm(weights, values)
    if values.dtype != torch.float32:
        # Few and large tiles: filling the last one would cost more than this loop. Rounded once, like one product.
        total = torch.bmm(weights[..., :key_tile], values[:, :key_tile]).float()
        for start in range(key_tile, span, key_tile):
            tile = slice(start, start + key_tile)
            total += torch.bmm(weights[..., tile], values[:, tile])
        return total.to(values.dtype)
    tiles = span // key_tile
    cut = weights.view(num, height, tiles, key_tile).transpose(1, 2).reshape(-1, height, key_tile)
    parts = torch.bmm(cut, values.reshape(num * tiles, key_tile, -1))
    return parts.view(num, tiles, height, -1).cumsum(1)[:, -1]


def ragged_rows(
    cu_query_len: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    context_len: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    names: Sequence[str] = (),
) -> RaggedRows:
    """The rows of a step plan, widened to int64."""
    cu = cu_query_len.astype(np.int64)
    return RaggedRows(
        cu,
        positions.astype(np.int64),
        context_len.astype(np.int64) + np.diff(cu),
        block_tables.astype(np.int64),
        names,
    )
