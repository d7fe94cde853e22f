from typing import Any

import pytest

from actors.core.kv_blocks import BlockLease, BlockPool


def test_a_lease_covers_its_tokens_and_not_a_block_more() -> None:
    pool = BlockPool(num_blocks=10, block_size=4)
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
        lease = pool.lease(num_tokens)
        assert lease is not None
        assert (lease.num_blocks, lease.num_tokens) == (num_blocks, num_blocks * 4)
        lease.release()


def test_a_lease_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    assert pool.lease(13) is None
    assert pool.num_free == 3
    assert pool.lease(12) is not None
    assert pool.lease(1) is None


def test_release_twice_frees_once() -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    first, second = pool.lease(2), pool.lease(2)
    assert first is not None and second is not None
    first.release()
    third = pool.lease(2)
    first.release()
    assert third is not None
    assert set(third.blocks) & set(second.blocks) == set()
    assert pool.num_free == 0
    assert pool.check_integrity() == []


def test_blocks_of_a_released_lease_cannot_be_read() -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    lease = pool.lease(1)
    assert lease is not None
    lease.release()
    with pytest.raises(AssertionError, match="was released"):
        _ = lease.blocks


def make_lease(pool: BlockPool, num_tokens: int) -> BlockLease:
    lease = pool.lease(num_tokens)
    assert lease is not None
    return lease


def test_a_named_block_is_found_shared_and_kept_after_its_lease() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    first = make_lease(pool, 4)
    block = int(first.blocks[0])
    pool.name(block, b"x")
    second = make_lease(pool, 2)
    assert pool.find(b"x") == block and pool.find(b"y") is None
    second.share(0, block)
    assert second.blocks.tolist() == [block] and pool.num_free == 2
    first.release()
    assert (pool.num_free, pool.num_unused) == (3, 0), "the second lease holds it still"
    second.release()
    assert (pool.num_free, pool.num_unused) == (4, 1)
    third = make_lease(pool, 2)
    third.share(0, block)
    assert pool.num_unused == 0 and pool.check_integrity() == []


def test_the_first_to_name_a_content_keeps_the_name() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    lease = make_lease(pool, 4)
    one, other = lease.blocks.tolist()
    pool.name(one, b"x")
    pool.name(other, b"x")
    pool.name(one, b"y")
    assert (pool.find(b"x"), pool.find(b"y")) == (one, None)
    lease.release()
    assert pool.num_unused == 1 and pool.check_integrity() == []


def test_the_longest_unused_goes_first_and_of_one_lease_the_last_block() -> None:
    pool = BlockPool(num_blocks=5, block_size=1)
    old, new = make_lease(pool, 2), make_lease(pool, 3)
    for lease, names in ((old, (b"a", b"b")), (new, (b"c", b"d", b"e"))):
        for block, name in zip(lease.blocks.tolist(), names, strict=True):
            pool.name(block, name)
    old.release()
    new.release()
    left = [b"a", b"c", b"d", b"e"], [b"c", b"d", b"e"], [b"c", b"d"], [b"c"]
    for number, names in enumerate(left, 1):
        make_lease(pool, 1)
        assert [n for n in (b"a", b"b", b"c", b"d", b"e") if pool.find(n) is not None] == names
        assert pool.num_evicted == number and pool.check_integrity() == []


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    lease = make_lease(pool, 2)
    pool.name(int(lease.blocks[0]), b"a")
    assert pool.lease(2) is None
    make_lease(pool, 1)
    assert pool.find(b"a") == lease.blocks[0] and pool.num_evicted == 0


def test_only_known_blocks_are_shared_and_only_held_ones_named() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    lease = make_lease(pool, 1)
    with pytest.raises(AssertionError, match="no known content"):
        lease.share(0, 2)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.name(2, b"a")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda pool: pool._stack.pop(), "blocks != 4"),
        (lambda pool: pool._stack.append(pool._stack[0]), "free twice"),
        (lambda pool: pool._stack.append(0), "in two states"),
        (lambda pool: pool._leases.popitem(), "other holders than the open leases"),
        (lambda pool: pool._by_digest.pop(b"held"), "names of blocks and blocks of names"),
        (lambda pool: pool._digests.pop(1), "without a name"),
        (lambda pool: pool._digests.update({3: b"free"}), "free blocks with a name"),
    ],
)
def test_integrity_sees(damage: Any, problem: str) -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    kept, over = make_lease(pool, 1), make_lease(pool, 1)
    pool.name(int(kept.blocks[0]), b"held")
    pool.name(int(over.blocks[0]), b"unused")
    over.release()
    assert pool.check_integrity() == []
    damage(pool)
    assert any(problem in found for found in pool.check_integrity())
