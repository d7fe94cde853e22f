"""Memory for more requests than fit at their longest: the last one gives way, and no stream says anything else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.messages import AbortRequest, CloseDraft
from tests.pure.rank_harness import Session, Stream, admitted, make_rank
from tests.pure.scripted_drafter import oracle

PROMPTS = {name: [number + 3, 1, 4, 1, 5] for number, name in enumerate("abcd")}


def session_of(num_blocks: int, error: float = 0.0, **overrides: object) -> Session:
    limits = {"block_size": 4, "max_model_len": 4 * num_blocks, "gamma": 3} | overrides
    return Session(make_rank(num_blocks=num_blocks, **limits), error=error)


def until_preempted(session: Session) -> None:
    while not session.rank.counters.num_preempted:
        assert session.step() is not None


def assert_as_expected(session: Session, max_new: int) -> None:
    for name, stream in session.streams.items():
        assert (stream.tokens, stream.reason) == oracle(PROMPTS[name], max_new)
    assert session.rank.check_idle() == []


def test_requests_run_beside_each_other_that_would_not_fit_at_their_longest() -> None:
    session = session_of(16)
    for name in "abc":
        session.submit(admitted(name, PROMPTS[name], 20))
    session.step()
    assert int(session.rank.book.table.is_running.sum()) == 3, "7 blocks each at their longest"
    session.run()
    assert_as_expected(session, 20)


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_last_one_gives_way_and_says_the_same_later(gamma: int, prefix_cache: bool) -> None:
    session = session_of(12, gamma=gamma, prefix_cache=prefix_cache)
    for name in "abc":
        session.submit(admitted(name, PROMPTS[name], 30))
    preempted: list[str] = []
    while session.step() is not None or not session.rank.is_idle:
        session.now += 0.3
        preempted += [r.request_id for r in session.rank.book.waiting if r.num_output]
        assert session.rank.book.pool.check_integrity() == []
    assert session.rank.counters.num_preempted > 0
    assert set(preempted) == {"b", "c"}
    assert_as_expected(session, 30)


def test_a_lower_priority_gives_way_though_it_came_first() -> None:
    session = session_of(12)
    for name, priority in (("a", 1), ("b", 0)):
        session.submit(replace(admitted(name, PROMPTS[name], 36), priority=priority))
    until_preempted(session)
    assert [r.request_id for r in session.rank.book.waiting] == ["a"]
    session.run()
    assert_as_expected(session, 36)


def test_a_preempted_request_goes_on_before_those_that_came_later() -> None:
    session = session_of(12)
    for name in "abcd":
        session.submit(admitted(name, PROMPTS[name], 30))
    ends: list[str] = []
    while not session.rank.is_idle:
        session.step()
        session.now += 0.3
        ends += [n for n, stream in session.streams.items() if stream.reason and n not in ends]
    assert ends == ["a", "b", "c", "d"]


def test_its_drafter_forgets_it_and_is_told_all_again() -> None:
    session = session_of(12)
    for name in "ab":
        session.submit(admitted(name, PROMPTS[name], 38))
    until_preempted(session)
    assert [m.request_ids for _, m in session.sent if isinstance(m, CloseDraft)] == [("b",)]
    assert set(session.drafter.contexts) == {"a"}
    while "b" not in session.drafter.contexts:
        session.step()
    assert session.drafter.contexts["b"].start == 0
    session.run()
    assert_as_expected(session, 38)


def test_short_of_blocks_a_round_verifies_less_before_anybody_gives_way() -> None:
    session = session_of(5)
    session.submit(admitted("a", PROMPTS["a"], 7))
    session.submit(admitted("b", PROMPTS["b"], 7))
    session.step()
    session.step()
    assert session.decisions[-1].caps.tolist() == [3, 2]
    assert session.decisions[-1].cut_by(1) == "blocks", "its stream could have used a third"
    assert session.rank.counters.num_preempted == 0
    session.run()
    assert_as_expected(session, 7)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_preempted_request_can_be_aborted(restarted: bool) -> None:
    session = session_of(12)
    for name in "ab":
        session.submit(admitted(name, PROMPTS[name], 38))
    until_preempted(session)
    while restarted and session.rank.book.waiting:
        session.step()
    session.deliver(session.rank.on_message(AbortRequest("b", 0), session.now))
    session.run()
    assert session.streams["b"].reason == "abort"
    assert session.streams["a"].tokens == oracle(PROMPTS["a"], 38)[0]
    assert session.rank.check_idle() == []


def test_a_prompt_waits_until_there_is_room_for_it_beside_those_that_run() -> None:
    session = session_of(12)
    session.submit(admitted("a", [2] * 30, 12))
    session.step()
    session.submit(admitted("b", PROMPTS["b"], 4))
    session.submit(admitted("c", [5] * 8, 4))
    session.step()
    assert [r.request_id for r in session.rank.book.waiting] == ["c"]
    session.run()
    assert session.streams["c"].tokens == oracle([5] * 8, 4)[0]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_in_any_pool_every_stream_is_the_oracles(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    num_blocks = rng.choice([40, 50, 70]) // block_size
    session = session_of(
        num_blocks,
        rng.choice([0.0, 0.3]),
        block_size=block_size,
        max_model_len=40 // block_size * block_size,
        gamma=rng.choice([0, 1, 3]),
        max_batch_tokens=rng.choice([3, 8, 40]),
        prefix_cache=rng.random() < 0.7,
        max_waiting=20,
    )
    expected: dict[str, tuple[list[int], str]] = {}
    for _ in range(400):
        if len(expected) < 12 and rng.random() < 0.4:
            name = f"r{len(expected)}"
            prompt = [rng.randrange(3) for _ in range(rng.choice([1, 4, 10]))]
            max_new = rng.choice([5, 20, 28])
            expected[name] = oracle(prompt, max_new)
            message = replace(admitted(name, prompt, max_new), priority=rng.choice([0, 0, 1]))
            session.submit(message)
        if session.step() is None:
            session.now += 0.3
        assert session.rank.book.pool.check_integrity() == []
        if len(expected) == 12 and session.rank.is_idle:
            break
    else:
        raise AssertionError("it never ends")
    for name, stream in session.streams.items():
        refused = stream.reason == "error" and not stream.tokens
        assert refused or (stream.tokens, stream.reason) == expected[name], name
    assert isinstance(session.streams["r0"], Stream) and session.rank.check_idle() == []
