import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_integrity_sees_a_block_given_back_behind_the_pools_back() -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    lease = pool.lease(2)
    assert lease is not None
    pool._num_free += 1
    assert "free + 2 owned blocks != 4" in pool.check_integrity()[0]
    pool._num_free -= 1
    pool._owner[lease.blocks[0]] = -1
    assert pool.check_integrity() != []


def test_integrity_sees_doubles_and_lost_leases() -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    lease = pool.lease(1)
    assert lease is not None
    pool._stack[0] = pool._stack[1]
    assert any("free twice" in problem for problem in pool.check_integrity())
    pool._stack[0] = lease.blocks[0]
    assert any("both free and owned" in problem for problem in pool.check_integrity())
    pool = BlockPool(num_blocks=4, block_size=1)
    pool._num_leases = 1
    assert any("open leases" in problem for problem in pool.check_integrity())


@settings(deadline=None, max_examples=60)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["lease", "release", "again"]), st.integers(1, 40)), max_size=60
    )
)
def test_any_order_of_leases_keeps_the_books_straight(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks=20, block_size=3)
    live: list[BlockLease] = []
    dead: list[BlockLease] = []
    for action, number in actions:
        if action == "lease":
            free = pool.num_free
            lease = pool.lease(number)
            assert (lease is None) == (-(-number // 3) > free)
            if lease is not None:
                live.append(lease)
        elif action == "release" and live:
            dead.append(live.pop(number % len(live)))
            dead[-1].release()
        elif action == "again" and dead:
            dead[number % len(dead)].release()
        owned = [block for lease in live for block in lease.blocks.tolist()]
        assert len(owned) == len(set(owned)) == 20 - pool.num_free
        assert pool.num_leases == len(live)
        assert pool.check_integrity() == []
