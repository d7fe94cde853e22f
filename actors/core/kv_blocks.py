"""KV blocks of one rank: a pool, leases that give their blocks back exactly once, and blocks known by their content.

A lease names the blocks of one request. A block whose tokens are committed may be given a digest of them: other leases
can then share it instead of computing it again, and it is kept after its last lease has ended until the room is needed
(the one unused for longest goes first, and of one request the last block before the first, so that what is left is
always a prefix). Only full blocks that nobody writes any more may be named.

A block is therefore in exactly one of three states: free (on the stack), unused (named, held by nobody: counted as
free, since it can be taken at any time), or held by one lease or several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


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
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens whose K/V the lease has room for."""
        return len(self._blocks) * self._pool.block_size

    def extend(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False, and nothing taken, when the pool has too few blocks."""
        missing = self._pool.blocks_for(num_tokens) - len(self.blocks)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            self._blocks = np.concatenate((self._blocks, self._pool._take(missing)))
        return True

    def share(self, index: int, block: int) -> None:
        """Hold the named `block` as the one at `index`, instead of an own one without a name."""
        own = int(self.blocks[index])
        self._pool._hold(block)
        self._blocks[index] = block
        self._pool._let_go(own)

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._pool._give_back(self.lease_id, self._blocks)


class BlockPool:
    """`num_blocks` physical blocks of `block_size` tokens, and who holds each of them.

    Attributes:
        num_evicted: named blocks whose room was needed for others.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, f"{num_blocks} blocks of {block_size} tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        # A stack, lowest id on top: blocks just freed are the next to be used, while they are warm.
        self._stack = list(range(num_blocks - 1, -1, -1))
        self._num_holders = np.zeros(num_blocks, np.int32)
        self._leases: dict[int, BlockLease] = {}
        self._next_lease_id = 0
        self._digests: dict[int, bytes] = {}  # of the named blocks
        self._by_digest: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # named blocks; the first goes first

    @property
    def num_free(self) -> int:
        """Blocks a lease could take now, unused ones included."""
        return len(self._stack) + len(self._unused)

    @property
    def num_unused(self) -> int:
        """Blocks that are kept for their content only."""
        return len(self._unused)

    @property
    def num_leases(self) -> int:
        """Leases that have not been released."""
        return len(self._leases)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lease(
        self, num_tokens: int, shared: Sequence[int] = (), spare: int = 0
    ) -> BlockLease | None:
        """Blocks for `num_tokens` tokens, the named ones in `shared` first.

        None when fewer than `spare` blocks would be left free; nothing is taken then.
        """
        assert num_tokens > 0, f"a lease of {num_tokens} tokens"
        needed = self.blocks_for(num_tokens) - len(shared)
        num_awake = sum(block in self._unused for block in shared)
        if needed + num_awake + spare > self.num_free:
            return None
        for block in shared:
            self._hold(block)
        blocks = np.concatenate((np.array(shared, np.int32), self._take(needed)))
        lease = BlockLease(self, self._next_lease_id, blocks)
        self._next_lease_id += 1
        self._leases[lease.lease_id] = lease
        return lease

    # --- content ----------------------------------------------------------------------------------------------------

    def find(self, digest: bytes) -> int | None:
        """The block that holds what the digest stands for."""
        return self._by_digest.get(digest)

    def name(self, block: int, digest: bytes) -> None:
        """Say what a held, full block contains; nothing changes where another block is known for the same."""
        assert self._num_holders[block], f"block {block} is held by nobody"
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._by_digest[self._digests.pop(block)]
        self.num_evicted += 1
        return block

    # --- holding ----------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Int32:
        from_stack = min(count, len(self._stack))
        blocks = [self._stack.pop() for _ in range(from_stack)]
        blocks += [self._evict() for _ in range(count - from_stack)]
        taken: Int32 = np.array(blocks, np.int32)
        assert (self._num_holders[taken] == 0).all(), "a free block is held"
        self._num_holders[taken] = 1
        return taken

    def _hold(self, block: int) -> None:
        assert block in self._digests, f"block {block} has no known content to share"
        self._unused.pop(block, None)
        self._num_holders[block] += 1

    def _let_go(self, block: int) -> None:
        assert self._num_holders[block] > 0, f"block {block} is given back twice"
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if block in self._digests:
            self._unused[block] = None
        else:
            self._stack.append(block)

    def _give_back(self, lease_id: int, blocks: Int32) -> None:
        del self._leases[lease_id]
        for block in blocks[::-1].tolist():
            self._let_go(block)

    # --- the books --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when every block is in one state, with as many holders as leases say."""
        problems: list[str] = []
        free, held = self._stack, np.flatnonzero(self._num_holders).tolist()
        if len(free) + len(self._unused) + len(held) != self.num_blocks:
            counts = f"{len(free)} free + {len(self._unused)} unused + {len(held)} held"
            problems.append(f"{counts} blocks != {self.num_blocks}")
        if len(set(free)) != len(free):
            problems.append("a block is free twice")
        if (
            both := set(free) & set(held)
            | set(self._unused) & set(held)
            | set(free) & set(self._unused)
        ):
            problems.append(f"blocks in two states: {sorted(both)[:8]}")
        leased = [lease.blocks for lease in self._leases.values()]
        counted = np.bincount(
            np.concatenate([[], *leased]).astype(np.int64), minlength=self.num_blocks
        )
        if wrong := np.flatnonzero(counted != self._num_holders).tolist():
            problems.append(f"blocks with other holders than the open leases: {wrong[:8]}")
        if {d: b for b, d in self._digests.items()} != self._by_digest:
            problems.append("names of blocks and blocks of names differ")
        if unnamed := self._unused.keys() - self._digests.keys():
            problems.append(f"blocks kept without a name: {sorted(unnamed)[:8]}")
        if named := set(free) & self._digests.keys():
            problems.append(f"free blocks with a name: {sorted(named)[:8]}")
        return problems
