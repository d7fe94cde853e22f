"""Verification attention over paged K/V on a GPU: how a step is cut into tiles, and the torch twin of the kernel.

The step is a flat list of tokens, each with its row (whose blocks hold its keys) and its position (how far it sees).
A tile is up to `tile_tokens` neighbouring tokens of one row: they read its keys once, for all query heads that share
them. Long contexts are cut into splits of a fixed number of keys, at multiples of that number: a token's sum is then
grouped in the same way whatever is computed beside it, which is what `reproducible` asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.ragged_attention import RaggedRows

TILE_ROWS = 64  # queries times shared heads in a tile: one warpgroup product
SPLIT_KEYS = 512
KEY_BLOCK = 64
MOST_SPLITS = 32  # of the longest context a model serves
SMALL_TILE_ROWS = (16, 32)
WAVE = 132 * 2  # programs that fill the machine, with some to hide latency behind
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PagedShape:
    """What a kernel is compiled and launched for."""

    tile_rows: int
    split_keys: int
    num_splits: int

    @classmethod
    def fixed(cls, heads_per_kv: int, max_model_len: int) -> PagedShape:
        """The same for every step: what `reproducible` asks for, and what a captured step is replayed with."""
        split_keys = max(SPLIT_KEYS, _power_of_two(ceil(max_model_len / MOST_SPLITS)))
        tile_rows = max(TILE_ROWS, _power_of_two(heads_per_kv))
        return cls(tile_rows, split_keys, max(1, ceil(max_model_len / split_keys)))

    def up_to(self, max_kv_len: int) -> PagedShape:
        """No more splits than these contexts reach; each token's sum stays the same."""
        return replace(self, num_splits=max(1, ceil(max_kv_len / self.split_keys)))

    @classmethod
    def fast(cls, query_len: Int, max_kv_len: int, heads_per_kv: int, kv_heads: int) -> PagedShape:
        """Follows the step: small tiles where queries are short, splits that fill the GPU."""
        longest = int(query_len.max(initial=1)) * heads_per_kv
        widest = max(TILE_ROWS, _power_of_two(heads_per_kv))
        tile_rows = next((rows for rows in SMALL_TILE_ROWS if rows >= longest), widest)
        tiles = int(np.ceil(query_len / (tile_rows // heads_per_kv)).sum()) * kv_heads
        wanted = ceil(WAVE / max(tiles, 1))
        split_keys = max(SPLIT_KEYS // 2, _power_of_two(ceil(max_kv_len / wanted)))
        return cls(tile_rows, split_keys, max(1, ceil(max_kv_len / split_keys)))


@dataclass(frozen=True)
class PagedLayout:
    """The attention of one step, on the device; the same for all layers.

    `positions` is -1 and no tile names a token that only pads the step: nothing is computed for it.
    """

    tiles: Tensor  # [T, 3] int32: first token, number of tokens (0 pads), row
    positions: Tensor  # [B] int32
    block_tables: Tensor  # [R, max_blocks] int32
    block_size: int
    shape: PagedShape
    window: int = 0  # keys a token sees, its own included; 0: all


def cut_tiles(
    cu_query_len: Int, tile_tokens: int, num_tiles: int | None = None
) -> npt.NDArray[np.int32]:
    """Tiles [T, 3] of the rows of a step, filled up with empty ones to `num_tiles`."""
    query_len = np.diff(cu_query_len)
    per_row = -(-query_len // tile_tokens)
    row = np.repeat(np.arange(len(query_len)), per_row)
    within = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    tiles = np.zeros((max(len(row), num_tiles or 0), 3), np.int32)
    tiles[: len(row), 0] = cu_query_len[row] + within * tile_tokens
    tiles[: len(row), 1] = np.minimum(query_len[row] - within * tile_tokens, tile_tokens)
    tiles[: len(row), 2] = row
    return tiles


def max_tiles(num_rows: int, batch_tokens: int, tile_tokens: int) -> int:
    """Tiles that suffice for any step of so many rows and tokens."""
    return min(batch_tokens, num_rows + batch_tokens // tile_tokens)


def paged_layout(
    rows: RaggedRows,
    shape: PagedShape,
    heads_per_kv: int,
    block_size: int,
    device: torch.device,
    window: int = 0,
) -> PagedLayout:
    """Lay out a step that needs no padding."""

    def put(array: npt.NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

    return PagedLayout(
        put(cut_tiles(rows.cu_query_len, shape.tile_rows // heads_per_kv)),
        put(rows.positions),
        put(rows.block_tables),
        block_size,
        shape,
        window,
    )


def attend_paged(queries: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
    """The torch twin: attention of each token to the keys of its row up to its position, [B, heads * head_dim].

    Tokens that no tile names get zeros.

    Args:
        queries: [B, heads, head_dim], rotated and scaled.
        keys, values: [kv_heads, slots, head_dim] of one layer; heads may lie any distance apart, the same in both.
    """
    kv_heads, size = len(keys), layout.block_size
    out = torch.zeros_like(queries)
    for first, count, row in layout.tiles.tolist():
        for token in range(first, first + count):
            position = int(layout.positions[token])
            start = max(0, position + 1 - layout.window) if layout.window else 0
            at = torch.arange(start, position + 1, device=queries.device)
            slots = layout.block_tables[row].long()[at // size] * size + at % size
            own = queries[token].float().view(kv_heads, -1, queries.shape[-1])
            weights = (own @ keys[:, slots].float().mT).softmax(-1)
            out[token] = (weights @ values[:, slots].float()).reshape(queries.shape[1:])
    return out.flatten(1)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
