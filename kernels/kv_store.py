"""Paged keys and values: one pool, one write and one read per layer.

The pool is [layers, 2 * kv_heads, num_blocks, block_size, head_dim], keys before values. A block of one head is
contiguous, so reading the blocks of R requests is one `index_select` whose result is, without another copy, the
[kv_heads * R, context, head_dim] operand of both batched products of attention.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class KvStore:
    """K/V of every layer in blocks of `block_size` tokens. Zeroed, so that nothing ever read is not a number."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, 2 * num_kv_heads, num_blocks * block_size, head_dim)
        pool = torch.zeros(shape, dtype=dtype, device=device)
        self._slots = list(pool.unbind(0))  # per layer [2 * kv_heads, slots, head_dim]
        self._blocks = [p.view(2 * num_kv_heads, num_blocks, -1) for p in self._slots]

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store keys_values [B, 2 * kv_heads, head_dim] at the physical slots [B]."""
        self._slots[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def pool(self, layer: int) -> Tensor:
        """All of a layer, [2 * kv_heads, slots, head_dim], keys before values: what kernels read and write."""
        return self._slots[layer]

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks` [R * n], each [kv_heads, R * n * block_size, head_dim], contiguous."""
        found = self._blocks[layer].index_select(1, blocks)
        found = found.view(2 * self.num_kv_heads, -1, self.head_dim)
        return found[: self.num_kv_heads], found[self.num_kv_heads :]

    def copy_blocks(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, in all layers."""
        from_ids, to_ids = (torch.from_numpy(a.astype(np.int64)) for a in (source, target))
        for blocks in self._blocks:
            where = blocks.device
            blocks.index_copy_(1, to_ids.to(where), blocks.index_select(1, from_ids.to(where)))
