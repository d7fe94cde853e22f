"""KV blocks of one rank: a pool, and leases that give their blocks back exactly once.

A request leases the blocks for its worst case (prompt plus every token it may still produce) before it is admitted,
so a running request never finds the pool empty. The physical ids are fixed for the life of the lease: its block table
is written once and never grows.

Blocks leave the pool in `_take` and come back in `_give_back`, nowhere else: a prefix cache (blocks kept by the hash of
their content after their lease ended, shared by later leases) belongs between these two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

_FREE = -1


class BlockLease:
    """Blocks that belong to one holder until `release`, which may be called any number of times."""

    def __init__(self, pool: BlockPool, lease_id: int, blocks: Int32) -> None:
        self._pool = pool
        self._blocks = blocks
        self.lease_id = lease_id
        self.released = False

    @property
    def blocks(self) -> Int32:
        """[num_blocks] physical ids in logical order: the block table of the holder."""
        assert not self.released, (
            f"lease {self.lease_id} was released: its blocks may belong to another"
        )
        return self._blocks

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V the lease has room for."""
        return len(self._blocks) * self._pool.block_size

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._pool._give_back(self.lease_id, self._blocks)


class BlockPool:
    """`num_blocks` physical blocks of `block_size` tokens, and who owns each of them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"{num_blocks} blocks of {block_size} tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack, lowest id on top: blocks just freed are the next to be used, while they are warm.
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._owner = np.full(num_blocks, _FREE, np.int64)
        self._next_lease_id = 0
        self._num_leases = 0

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_leases(self) -> int:
        """Leases that have not been released."""
        return self._num_leases

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lease(self, num_tokens: int) -> BlockLease | None:
        """Blocks for `num_tokens` tokens, or None when the pool has too few. Never takes a part of them."""
        assert num_tokens > 0, f"a lease of {num_tokens} tokens"
        needed = self.blocks_for(num_tokens)
        if needed > self._num_free:
            return None
        lease_id = self._next_lease_id
        self._next_lease_id += 1
        return BlockLease(self, lease_id, self._take(lease_id, needed))

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when every block is either free once or owned once."""
        problems: list[str] = []
        free = self._stack[: self._num_free]
        owned = np.flatnonzero(self._owner != _FREE)
        if len(free) + len(owned) != self.num_blocks:
            problems.append(f"{len(free)} free + {len(owned)} owned blocks != {self.num_blocks}")
        if len(np.unique(free)) != len(free):
            problems.append("a block is free twice")
        both = np.intersect1d(free, owned)
        if len(both):
            problems.append(f"blocks both free and owned: {both[:8].tolist()}")
        num_owners = len(np.unique(self._owner[owned]))
        if num_owners != self._num_leases:
            problems.append(f"{num_owners} owners of blocks, but {self._num_leases} open leases")
        return problems

    def _take(self, lease_id: int, count: int) -> Int32:
        top = self._num_free - count
        blocks = self._stack[top : self._num_free][::-1].copy()
        assert (self._owner[blocks] == _FREE).all(), "a free block has an owner"
        self._owner[blocks] = lease_id
        self._num_free = top
        self._num_leases += 1
        return blocks

    def _give_back(self, lease_id: int, blocks: Int32) -> None:
        assert (self._owner[blocks] == lease_id).all(), f"lease {lease_id} frees blocks of others"
        self._owner[blocks] = _FREE
        self._stack[self._num_free : self._num_free + len(blocks)] = blocks[::-1]
        self._num_free += len(blocks)
        self._num_leases -= 1
