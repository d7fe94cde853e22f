"""KV blocks as a state machine: any order of leases, writes, names, shares, growth and ends.

The model is the memory itself. Every lease writes a text, block after block; whatever the pool does, what a lease has
written (or taken over from another) must still lie in its blocks, a named block must hold what its name says, and a
block is free exactly when no open lease has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from actors.core.kv_blocks import BlockLease, BlockPool
from tests.pure.machines import finds, holds

NUM_BLOCKS, BLOCK_SIZE, NUM_TEXTS, MAX_BLOCKS = 7, 2, 2, 4


def content(text: int, index: int) -> bytes:
    """What block `index` of a text holds; a digest stands for all blocks before it, too."""
    return b"%d:%d" % (text, index)


class BlockMachine(RuleBasedStateMachine):
    leases: Bundle[tuple[BlockLease, int]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.memory: dict[int, bytes] = {}
        self.open: dict[int, BlockLease] = {}
        self.texts: dict[int, int] = {}
        self.num_written: dict[int, int] = {}  # leading blocks that hold their text

    @rule(
        target=leases,
        text=st.integers(0, NUM_TEXTS - 1),
        num_tokens=st.integers(1, MAX_BLOCKS * BLOCK_SIZE),
        spare=st.sampled_from([0, 0, 0, 2]),
        looks=st.sampled_from([True, True, False]),
    )
    def lease(self, text: int, num_tokens: int, spare: int, looks: bool) -> Any:
        known: list[int] = []
        most = num_tokens // BLOCK_SIZE if looks else 0
        while len(known) < most:
            block = self.pool.find(content(text, len(known)))
            if block is None:
                break
            known.append(block)
        free = self.pool.num_free
        lease = self.pool.lease(num_tokens, known, spare)
        if lease is None:
            assert self.pool.num_free == free < self.pool.blocks_for(num_tokens) + spare
            return multiple()
        assert lease.num_tokens >= num_tokens and self.pool.num_free >= spare
        assert lease.blocks[: len(known)].tolist() == known
        self.open[lease.lease_id], self.texts[lease.lease_id] = lease, text
        self.num_written[lease.lease_id] = len(known)
        return lease, text

    @rule(held=leases, count=st.integers(1, MAX_BLOCKS), names=st.sampled_from([True, True, False]))
    def write(self, held: tuple[BlockLease, int], count: int, names: bool) -> None:
        """The next blocks are computed, and may be named; whoever shares a block never writes it again."""
        lease, text = held
        if lease.lease_id not in self.open:
            return
        first = self.num_written[lease.lease_id]
        for index in range(first, min(first + count, lease.num_blocks)):
            self.memory[int(lease.blocks[index])] = content(text, index)
            self.num_written[lease.lease_id] += 1
            if names:
                self.pool.name(int(lease.blocks[index]), content(text, index))
                assert self.pool.find(content(text, index)) is not None

    @rule(held=leases)
    def share(self, held: tuple[BlockLease, int]) -> None:
        """Another has computed the next block meanwhile."""
        lease, text = held
        index = self.num_written.get(lease.lease_id, 0)
        if lease.lease_id in self.open and index < lease.num_blocks:
            block = self.pool.find(content(text, index))
            if block is not None:
                lease.share(index, block)
                self.num_written[lease.lease_id] += 1

    @rule(held=leases, num_tokens=st.integers(1, MAX_BLOCKS * BLOCK_SIZE))
    def extend(self, held: tuple[BlockLease, int], num_tokens: int) -> None:
        lease, _ = held
        if lease.lease_id in self.open:
            free, before = self.pool.num_free, lease.num_blocks
            fits = lease.extend(num_tokens)
            assert fits == (self.pool.blocks_for(num_tokens) - before <= free)
            assert not fits or lease.num_tokens >= num_tokens

    @rule(held=leases)
    def release(self, held: tuple[BlockLease, int]) -> None:
        """Any number of times."""
        held[0].release()
        self.open.pop(held[0].lease_id, None)

    @invariant()
    def what_was_written_is_still_there(self) -> None:
        for lease_id, lease in self.open.items():
            text = self.texts[lease_id]
            for index in range(self.num_written[lease_id]):
                assert self.memory[int(lease.blocks[index])] == content(text, index)

    @invariant()
    def a_name_says_what_a_block_holds(self) -> None:
        for text in range(NUM_TEXTS):
            for index in range(MAX_BLOCKS):
                block = self.pool.find(content(text, index))
                assert block is None or self.memory[block] == content(text, index)

    @invariant()
    def a_block_is_free_exactly_when_nobody_has_it(self) -> None:
        held = {block for lease in self.open.values() for block in lease.blocks.tolist()}
        assert self.pool.num_free == NUM_BLOCKS - len(held)
        assert self.pool.num_leases == len(self.open)
        assert self.pool.check_integrity() == []

    def teardown(self) -> None:
        for lease in self.open.values():
            lease.release()
        assert self.pool.num_free == NUM_BLOCKS and self.pool.num_leases == 0


def test_blocks_hold_what_their_leases_wrote_in_any_order_of_events() -> None:
    holds(BlockMachine)


# --- the machine sees -------------------------------------------------------------------------------------------------


def _frees_a_shared_block(pool: BlockPool, block: int) -> None:
    pool._num_holders[block] = 0
    if block in pool._digests:
        pool._unused[block] = None
    else:
        pool._stack.append(block)


def _evicts_and_keeps_the_name(pool: BlockPool) -> int:
    return pool._unused.popitem(last=False)[0]


def _holds_without_waking(pool: BlockPool, block: int) -> None:
    pool._num_holders[block] += 1


def _shares_and_keeps_its_own(lease: BlockLease, index: int, block: int) -> None:
    lease._pool._hold(block)
    lease._blocks[index] = block


def _releases_again(lease: BlockLease) -> None:
    lease.released = True
    lease._pool._leases.setdefault(lease.lease_id, lease)
    lease._pool._give_back(lease.lease_id, lease._blocks)


@pytest.mark.parametrize(
    ("of", "method", "mutant"),
    [
        (BlockPool, "_let_go", _frees_a_shared_block),
        (BlockPool, "_evict", _evicts_and_keeps_the_name),
        (BlockPool, "_hold", _holds_without_waking),
        (BlockLease, "share", _shares_and_keeps_its_own),
        (BlockLease, "release", _releases_again),
    ],
)
def test_the_machine_finds(
    of: type, method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(BlockMachine, of, method, mutant, monkeypatch)
