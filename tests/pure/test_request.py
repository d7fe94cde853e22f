import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.kv_blocks import BlockPool
from actors.core.request import Phase, Request, cut_at_stop, worst_case_len
from tests.pure.rank_harness import admitted


def make_request(
    max_new: int = 8, num_prior: int = 0, prompt_len: int = 5, **more: object
) -> Request:
    message = admitted("a", list(range(prompt_len)), max_new, num_prior=num_prior, **more)  # type: ignore[arg-type]
    return Request(message, 0)


def start(request: Request) -> None:
    lease = BlockPool(16, 4).lease(request.committed_len)
    assert lease is not None
    request.start(0, lease)


def test_the_published_fault_a_cap_must_not_mask_an_earlier_stop() -> None:
    # serving_faults D 37: the run holds the stop at index 2, the cap lies at 5.
    assert cut_at_stop([10, 11, 99, 20, 21, 22], frozenset({99}), 5) == ([10, 11, 99], "stop")


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    stops=st.frozensets(st.integers(0, 5), max_size=2),
    remaining=st.integers(1, 8),
)
def test_a_run_is_cut_as_if_its_tokens_came_one_by_one(
    tokens: list[int], stops: frozenset[int], remaining: int
) -> None:
    expected: list[int] = []
    reason = None
    for token in tokens:
        expected.append(token)
        reason = "stop" if token in stops else "length" if len(expected) == remaining else None
        if reason:
            break
    assert cut_at_stop(tokens, stops, remaining) == (expected, reason)


def test_the_lengths_through_a_life() -> None:
    request = make_request(max_new=8, prompt_len=5)
    assert (request.phase, request.num_prefill_left, request.num_remaining) == (Phase.WAITING, 5, 8)
    start(request)
    request.advance_prefill(3)
    assert (request.context_len, request.num_prefill_left) == (3, 2)
    request.advance_prefill(2)
    assert request.commit([7]) == ([7], None)
    assert (request.committed_len, request.context_len, request.phase) == (6, 5, Phase.RUNNING)
    # A round with two accepted drafts: K/V of the anchor and of both drafts is there, that of 10 is not.
    assert request.commit([8, 9, 10]) == ([8, 9, 10], None)
    assert (request.committed_len, request.context_len) == (9, 8)
    assert request.token_ids[:9].tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10]
    assert request.commit([1, 2, 3, 4, 5]) == ([1, 2, 3, 4], "length")
    request.finish()
    assert request.finished
    with pytest.raises(AssertionError, match="twice"):
        request.finish()


def test_a_delta_counts_indices_from_the_start_of_the_stream() -> None:
    request = make_request(max_new=8, num_prior=3, prompt_len=5)
    start(request)
    request.advance_prefill(5)
    emitted, reason = request.commit([7])
    delta = request.delta(emitted, reason)
    assert (delta.first_index, delta.token_ids, delta.finish_reason) == (3, (7,), None)
    emitted, reason = request.commit([8, 9])
    assert request.delta(emitted, reason).first_index == 4


def test_room_for_a_replay_is_what_is_still_to_come() -> None:
    assert worst_case_len(admitted("a", range(10), 8, num_prior=3)) == 15
    assert worst_case_len(admitted("a", range(10), 8, num_prior=8)) == 10
    assert make_request(max_new=8, num_prior=3, prompt_len=10).num_remaining == 5


@pytest.mark.parametrize(
    ("max_new", "usable_before", "usable_after_first"),
    [(1, False, False), (2, False, False), (3, True, True)],
)
def test_drafts_are_wanted_only_where_one_could_be_verified(
    max_new: int, usable_before: bool, usable_after_first: bool
) -> None:
    request = make_request(max_new=max_new)
    start(request)
    assert request.can_use_drafts is usable_before
    request.advance_prefill(5)
    request.commit([1])
    assert request.can_use_drafts is usable_after_first
    assert make_request(max_new=50, speculation=False).can_use_drafts is False


def test_token_ids_fit_the_worst_case_exactly() -> None:
    request = make_request(max_new=3, prompt_len=5)
    assert len(request.token_ids) == 8
    start(request)
    request.advance_prefill(5)
    for token in (1, 2):
        assert request.commit([token])[1] is None
    assert request.commit([3]) == ([3], "length")
    assert np.array_equal(request.token_ids, [0, 1, 2, 3, 4, 1, 2, 3])


def test_a_preempted_request_computes_all_it_has_committed_as_its_prompt() -> None:
    request = make_request(max_new=8, prompt_len=5)
    start(request)
    lease = request.lease
    request.skip_prefill(4)
    request.advance_prefill(1)
    request.commit([7])
    request.commit([8, 9])
    request.preempt()
    assert lease.released and (request.phase, request.slot) == (Phase.WAITING, -1)
    with pytest.raises(AssertionError, match="holds no blocks"):
        _ = request.lease
    assert request.num_prefill_left == 8
    start(request)
    request.skip_prefill(4)
    assert request.num_cached == 4, "cached are only tokens of its first start"
    request.advance_prefill(4)
    assert request.commit([1, 2, 3]) == ([1, 2, 3], None)
    assert (request.committed_len, request.num_output) == (11, 6)
