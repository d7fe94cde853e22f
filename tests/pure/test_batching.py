"""The ragged layout of a step, checked against a slow one written row by row."""

import random

import numpy as np
import pytest

from actors.core.batching import build_plan, shape_step, split_prefill
from actors.core.kv_blocks import BlockPool
from actors.core.prefill_pace import PrefillPace
from actors.core.request import Request
from actors.core.row_table import RowTable
from tests.pure.rank_harness import admitted

BLOCK_SIZE = 4
NO_BOUND = PrefillPace(2.5, None)


def make_table(num_slots: int = 8, gamma: int = 3) -> tuple[RowTable, BlockPool]:
    return RowTable(num_slots, max_blocks=32, gamma=gamma), BlockPool(512, BLOCK_SIZE)


def place(
    table: RowTable, pool: BlockPool, name: str, prompt_len: int, num_output: int = 0
) -> Request:
    """A request with `num_output` committed tokens; still in its prompt when that is 0."""
    lease = pool.lease(prompt_len + 30)
    assert lease is not None
    message = admitted(name, [ord(name[0]) % 50] * prompt_len, 30, top_k=len(name))
    request = Request(message, arrival=table.num_slots - table.num_free)
    table.place(request, lease)
    if num_output:
        request.advance_prefill(prompt_len)
        for token in range(num_output):
            request.commit([token])
        table.advance(request)
    return request


def test_the_layout_equals_one_written_row_by_row() -> None:
    rng = random.Random(3)
    table, pool = make_table()
    running = [
        place(table, pool, f"d{i}", rng.randrange(1, 9), rng.randrange(1, 9)) for i in range(4)
    ]
    prefilling = [place(table, pool, f"p{i}", 10) for i in range(2)]
    prefilling[1].advance_prefill(3)
    table.draft_token_ids[:] = np.arange(24).reshape(8, 3) + 20
    rounds = np.array([r.slot for r in running], np.intp)
    verify_len = np.array([0, 3, 1, 2], np.int32)
    plan = build_plan(
        7, table, BLOCK_SIZE, rounds, verify_len, [(prefilling[0], 10), (prefilling[1], 4)]
    )

    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for request, length in zip(running, verify_len.tolist(), strict=True):
        first = request.committed_len - 1
        tokens += [
            int(request.token_ids[first]),
            *table.draft_token_ids[request.slot, :length].tolist(),
        ]
        positions += range(first, first + 1 + length)
        slots += [physical(request, p) for p in range(first, first + 1 + length)]
    for request, start, length in ((prefilling[0], 0, 10), (prefilling[1], 3, 4)):
        tokens += request.token_ids[start : start + length].tolist()
        positions += range(start, start + length)
        slots += [physical(request, p) for p in range(start, start + length)]
    assert plan.token_ids.tolist() == tokens
    assert plan.positions.tolist() == positions
    assert plan.slot_mapping.tolist() == slots
    assert plan.cu_query_len.tolist() == [0, 1, 5, 7, 10, 20, 24]
    assert plan.samples.tolist() == [True] * 5 + [False]
    assert plan.verify_len.tolist() == [0, 3, 1, 2, 0, 0]
    assert plan.context_len.tolist() == [*(r.committed_len - 1 for r in running), 0, 3]
    assert plan.sampling.top_k.tolist() == [2] * 6
    assert plan.draft is not None and plan.draft.q_ids.shape == (6, 3, 1)
    for array in (
        plan.token_ids,
        plan.positions,
        plan.cu_query_len,
        plan.context_len,
        plan.slot_mapping,
    ):
        assert array.dtype == np.int32
    assert plan.block_tables.dtype == plan.verify_len.dtype == np.int32


def physical(request: Request, position: int) -> int:
    return int(request.lease.blocks[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


@pytest.mark.parametrize("committed", [4, 5, 8, 9])
def test_block_tables_reach_the_last_token_and_no_further(committed: int) -> None:
    table, pool = make_table()
    request = place(table, pool, "a", committed - 1, num_output=1)
    rounds = np.array([request.slot], np.intp)
    plan = build_plan(0, table, BLOCK_SIZE, rounds, np.array([0], np.int32), [])
    assert plan.block_tables.shape[1] == -(-committed // BLOCK_SIZE)
    assert plan.draft is None


def test_a_plan_is_a_snapshot() -> None:
    table, pool = make_table()
    request = place(table, pool, "a", 3, num_output=2)
    rounds = np.array([request.slot], np.intp)
    plan = build_plan(0, table, BLOCK_SIZE, rounds, np.array([2], np.int32), [])
    assert plan.draft is not None
    before = [
        a.copy() for a in (plan.token_ids, plan.block_tables, plan.draft.q_ids, plan.sampling.top_k)
    ]
    table.draft_token_ids[:] = table.block_table[:] = table.q_ids[:] = 9
    table.sampling.top_k[:] = 9
    after = (plan.token_ids, plan.block_tables, plan.draft.q_ids, plan.sampling.top_k)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_cleared_slot_keeps_nothing_for_the_next_request() -> None:
    table, pool = make_table(num_slots=1)
    first = place(table, pool, "first", 20, num_output=3)
    table.has_draft[0] = table.wants_draft[0] = True
    table.clear(0)
    first.give_back()
    with pytest.raises(AssertionError, match="cleared twice"):
        table.clear(0)
    assert not table.is_running[0]
    second = place(table, pool, "b", 2)
    assert not (table.has_draft[0] or table.wants_draft[0] or table.is_running[0])
    used = second.lease.num_blocks
    assert table.block_table[0, :used].tolist() == second.lease.blocks.tolist()
    assert not table.block_table[0, used:].any()
    assert table.committed_len[0] == 1


def test_chunks_are_cut_first_come_first_served() -> None:
    table, pool = make_table()
    first, second, third = (place(table, pool, name, 10) for name in "abc")
    order = [first, second, third]
    assert split_prefill(order, 15) == [(first, 10), (second, 5)]
    assert split_prefill(order, 10) == [(first, 10)]
    assert split_prefill(order, 0) == []
    first.advance_prefill(8)
    assert split_prefill(order, 100) == [(first, 2), (second, 10), (third, 10)]


def test_prefill_keeps_its_share_and_rounds_that_waited_longest_go_first() -> None:
    table, pool = make_table()
    running = [place(table, pool, f"d{i}", 1, num_output=1) for i in range(6)]
    slots = np.array([r.slot for r in running], np.intp)
    table.last_step[slots] = [5, 5, 5, 1, 2, 5]
    alone = shape_step(table, slots, [], max_batch_tokens=8, pace=NO_BOUND)
    assert (len(alone.rounds), alone.prefill_floor, alone.max_draft_tokens) == (6, 0, 2)
    prompt = place(table, pool, "prompt", 10)
    beside = shape_step(table, slots, [prompt], max_batch_tokens=8, pace=NO_BOUND)
    assert (len(beside.rounds), beside.prefill_floor, beside.max_draft_tokens) == (6, 2, 0)
    tight = shape_step(table, slots, [prompt], max_batch_tokens=4, pace=NO_BOUND)
    assert tight.rounds.tolist() == slots[[0, 3, 4]].tolist()
    prompt.advance_prefill(9)
    last = shape_step(table, slots, [prompt], max_batch_tokens=8, pace=NO_BOUND)
    assert last.prefill_floor == 1, "no more than what is left"
