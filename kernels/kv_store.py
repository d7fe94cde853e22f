"""Paged keys and values: one pool, one write and one read per layer.

The pool is [layers, 2 * kv_heads, num_blocks, block_size, head_dim], keys before values. A block of one head is one
contiguous row, so reading the blocks of R requests is one `index_select` of rows (over the first dimension: only there
torch shares it among threads), whose result is, without another copy, the [kv_heads * R, context, head_dim] operand of
both batched products of attention.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class KvStore:
    """K/V of every layer in blocks of `block_size` tokens. Zeroed, so that nothing ever read is not a number.

    Attributes:
        clock: writes so far, those of all layers of a step as one.
        written_at: [num_blocks] the clock of each block's last write, on a CPU: what copies go by.
    """

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
        self._rows = [p.view(2 * num_kv_heads * num_blocks, -1) for p in self._slots]
        self.clock = 0
        self.written_at = np.zeros(num_blocks, np.int64)
        self._head_starts = torch.arange(2 * num_kv_heads, device=device)[:, None] * num_blocks

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store keys_values [B, 2 * kv_heads, head_dim] at the physical slots [B]. A step begins with layer 0."""
        if layer == 0 and slots.device.type == "cpu":
            self._note(slots.numpy() // self.block_size)
        self._slots[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def pool(self, layer: int) -> Tensor:
        """All of a layer, [2 * kv_heads, slots, head_dim], keys before values: what kernels read and write."""
        return self._slots[layer]

    def block_rows(self, layer: int) -> Tensor:
        """[2 * kv_heads * num_blocks, block_size * head_dim]: a row is a block of one head."""
        return self._rows[layer]

    def token_rows(self, layer: int) -> Tensor:
        """[2 * kv_heads * slots, head_dim]: a row is a token of one head."""
        return self._slots[layer].view(-1, self.head_dim)

    def _note(self, blocks: npt.NDArray[np.integer]) -> None:
        self.clock += 1
        self.written_at[blocks] = self.clock

    def rows_of(self, blocks: Tensor) -> Tensor:
        """What `read` wants to know of `blocks` [n]: the row of each, in every head, [2 * kv_heads * n]."""
        return (self._head_starts + blocks).view(-1)

    def token_rows_of(self, slots: Tensor) -> Tensor:
        """The same for `token_rows`: the row of each of `slots` [n], in every head, [2 * kv_heads * n]."""
        return (self._head_starts * self.block_size + slots).view(-1)

    def read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of n blocks, each [kv_heads, n * block_size, head_dim], contiguous; rows from `rows_of`."""
        found = (
            self._rows[layer].index_select(0, rows).view(2 * self.num_kv_heads, -1, self.head_dim)
        )
        return found[: self.num_kv_heads], found[self.num_kv_heads :]

    def copy_blocks(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks, in all layers."""
        self._note(target)
        from_rows, to_rows = (
            self.rows_of(torch.from_numpy(blocks.astype(np.int64)).to(self._head_starts.device))
            for blocks in (source, target)
        )
        for rows in self._rows:
            rows.index_copy_(0, to_rows, rows.index_select(0, from_rows))


def wide(rows: Tensor) -> Tensor:
    """The same bytes [n, m] in numbers of 16 bytes where they fit: torch copies chosen rows number by number."""
    fits = rows.shape[1] * rows.element_size() % 16 == 0
    return rows.view(torch.complex128) if fits else rows
