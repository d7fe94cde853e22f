"""Reservations, aborts, repeated messages, dead ingresses: everything comes back, nothing runs twice."""

import numpy as np
import pytest

from actors.core.messages import AbortRequest, CloseDraft, ReservationReply, TokenDeltas
from actors.core.rank import Rank
from tests.pure.rank_harness import Session, admitted, make_rank, reserve
from tests.pure.scripted_drafter import DRAFTER, INGRESS, endpoint, oracle

PROMPT = [3, 1, 4, 1, 5]
LONG = [(3 * i) % 50 for i in range(20)]


def reply_of(rank: Rank, *args: object, now: float = 0.0) -> ReservationReply:
    ((_, message),) = rank.on_message(reserve(*args), now)  # type: ignore[arg-type]
    assert isinstance(message, ReservationReply)
    return message


def test_a_reservation_nobody_uses_frees_itself() -> None:
    rank = make_rank(reservation_ttl_s=5.0)
    reply_of(rank, "a", 5, 11, now=1.0)
    rank.plan_step(5.9)
    assert rank.book.desk.num_reservations == 1
    rank.plan_step(6.0)
    assert rank.book.desk.num_reservations == 0
    assert rank.book.desk.num_expired == 1
    assert rank.book.pool.num_free == 256
    assert rank.check_idle() == []


def test_asking_again_renews_the_same_reservation() -> None:
    rank = make_rank(reservation_ttl_s=5.0)
    reply_of(rank, "a", 5, 11, now=0.0)
    free = rank.book.pool.num_free
    assert reply_of(rank, "a", 5, 11, now=4.0).granted
    assert rank.book.pool.num_free == free
    rank.plan_step(8.0)
    assert rank.book.desk.num_reservations == 1


def test_a_request_whose_reservation_expired_gets_room_if_there_is_any() -> None:
    session = Session(make_rank())
    session.rank.on_message(reserve("a", 5, 4), 0.0)
    session.now = 100.0
    session.step()
    session.submit(admitted("a", PROMPT, 4))
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 4)[0]


def test_a_request_that_needs_more_than_it_reserved_gets_more() -> None:
    session = Session(make_rank(block_size=4))
    session.rank.on_message(reserve("a", 5, 2), 0.0)
    session.submit(admitted("a", PROMPT, 30))
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 30)[0]
    assert session.rank.check_idle() == []


def test_refusals_say_why_and_when_to_come_back() -> None:
    rank = make_rank(num_blocks=8, block_size=4, max_running=1, max_waiting=1)
    assert reply_of(rank, "a", 16, 8).granted
    full = reply_of(rank, "b", 24, 8)
    assert not full.granted and "6 KV blocks needed, 4 are free" in full.reason
    assert full.retry_after_s > 0
    assert reply_of(rank, "c", 1, 1).granted
    crowded = reply_of(rank, "d", 1, 1)
    assert not crowded.granted and "2 requests" in crowded.reason
    never = reply_of(rank, "e", 20, 20)
    assert not never.granted and "at most 32" in never.reason
    assert never.retry_after_s == 0.0, "it will never fit"
    assert not reply_of(rank, "f", 0, 5).granted
    assert rank.book.desk.num_refused == 4


def test_a_draining_rank_grants_nothing_and_finishes_what_it_has() -> None:
    session = Session(make_rank())
    session.submit(admitted("a", PROMPT, 6))
    session.rank.drain()
    assert "draining" in reply_of(session.rank, "b", 1, 1).reason
    session.rank.drain(is_drained=False)
    assert reply_of(session.rank, "c", 1, 1).granted
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 6)[0]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "prompt_ids is empty"),
        ([50], "outside 0..49"),
        ([-1], "outside"),
        ([1] * 200, "at most"),
    ],
)
@pytest.mark.parametrize("reserved", [False, True])
def test_a_request_that_cannot_run_is_answered_not_dropped(
    prompt: list[int], reason: str, reserved: bool
) -> None:
    session = Session(make_rank())
    if reserved:
        session.rank.on_message(reserve("a", 5, 6), 0.0)
    session.submit(admitted("a", prompt, 6))
    last = session.streams["a"].last
    assert last is not None and last.finish_reason == "error"
    assert reason in last.error
    assert session.rank.check_idle() == []


def test_an_unreserved_request_on_a_full_rank_is_told_to_reserve() -> None:
    session = Session(make_rank(num_blocks=8, block_size=4))
    session.rank.on_message(reserve("other", 31, 1), 0.0)
    session.submit(admitted("a", PROMPT, 6))
    last = session.streams["a"].last
    assert last is not None and (last.finish_reason, last.first_index) == ("error", 0)
    assert "reserve again" in last.error


def test_what_has_ended_is_forgotten_at_last() -> None:
    rank = make_rank()
    for i in range(9000):
        rank.on_message(AbortRequest(f"r{i}", 0), 0.0)
    assert len(rank.book.desk._ended) == 8192
    assert not rank.book.desk.is_known("r0", 0)
    assert rank.book.desk.is_known("r8999", 0)


def test_a_repeated_admission_changes_nothing() -> None:
    session = Session(make_rank())
    message = admitted("a", PROMPT, 6)
    session.submit(message)
    session.step()
    assert session.rank.on_message(message, session.now) == []
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 6)[0]
    assert session.rank.on_message(message, session.now) == [], "it is over, it must not run again"
    assert session.step() is None
    assert session.rank.counters.num_ignored == 2


def test_an_admission_that_comes_after_its_abort_does_not_run() -> None:
    session = Session(make_rank())
    session.rank.on_message(reserve("a", 5, 6), 0.0)
    assert session.rank.on_message(AbortRequest("a", 0), 0.0) == []
    assert session.rank.on_message(admitted("a", PROMPT, 6), 0.0) == []
    assert session.step() is None
    assert session.rank.check_idle() == []


def test_a_newer_generation_replaces_the_older_one() -> None:
    tokens = oracle(PROMPT, 20)[0]
    session = Session(make_rank())
    session.submit(admitted("a", PROMPT, 20))
    for _ in range(3):
        session.step()
    plan = session.rank.plan_step(session.now)
    assert plan is not None
    # The replay arrives while a step of the older generation is under way: its result must not leak into the stream.
    session.submit(admitted("a", PROMPT + tokens[:2], 20, num_prior=2, generation=1))
    session.deliver(session.rank.apply(plan, session.target.step(plan), session.now, 0.01))
    assert session.streams["a"].tokens == []
    session.run()
    assert session.streams["a"].tokens == tokens[2:]
    assert session.streams["a"].last is not None and session.streams["a"].last.generation == 1
    assert session.rank.check_idle() == []


def test_an_abort_of_an_older_generation_is_ignored() -> None:
    session = Session(make_rank())
    session.submit(admitted("a", PROMPT, 6, generation=2))
    session.step()
    assert session.rank.on_message(AbortRequest("a", 1), session.now) == []
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 6)[0]


def abort_waiting(session: Session) -> None:
    """Both slots are taken by others."""
    session.submit(admitted("x", PROMPT, 40))
    session.submit(admitted("y", PROMPT, 40))
    session.step()
    session.submit(admitted("a", LONG, 20))
    session.step()
    assert len(session.rank.book.waiting) == 1


def abort_prefilling(session: Session) -> None:
    session.submit(admitted("a", LONG, 20))
    session.step()
    assert 0 < session.rank.book.prefilling[0].num_prefill_left < len(LONG)


def abort_running(session: Session) -> None:
    session.submit(admitted("a", LONG, 20))
    for _ in range(5):
        session.step()
    assert session.rank.book.live["a"].num_output > 1


@pytest.mark.parametrize("reach", [abort_waiting, abort_prefilling, abort_running])
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_in_any_phase_gives_everything_back_within_a_step(reach, in_flight) -> None:  # type: ignore[no-untyped-def]
    session = Session(make_rank(max_batch_tokens=8, max_running=2))
    reach(session)
    plan = session.rank.plan_step(session.now) if in_flight else None
    request = session.rank.book.live["a"]
    num_tokens = len(session.streams["a"].tokens)
    had_draft_context = "a" in session.drafter.contexts
    session.deliver(session.rank.on_message(AbortRequest("a", 0), session.now))
    assert "a" not in session.drafter.contexts
    assert any(isinstance(m, CloseDraft) for _, m in session.sent) == had_draft_context
    if plan is not None:
        holds = request._lease is not None
        assert holds == ("a" in plan.request_ids), "blocks in use stay until the step is over"
        session.deliver(session.rank.apply(plan, session.target.step(plan), session.now, 0.01))
    assert request._lease is None
    assert "a" not in session.drafter.contexts, "a late commit opened it again"
    stream = session.streams["a"]
    assert (stream.reason, len(stream.tokens)) == ("abort", num_tokens)
    # Twice, and unknown: nothing happens.
    assert session.rank.on_message(AbortRequest("a", 0), session.now) == []
    assert session.rank.on_message(AbortRequest("nobody", 7), session.now) == []
    session.run()
    assert session.rank.check_idle() == []
    assert session.rank.counters.num_aborted == 1


def test_the_last_delta_of_an_abort_carries_the_counters() -> None:
    session = Session(make_rank(gamma=3), error=0.0)
    session.submit(admitted("a", PROMPT, 40))
    for _ in range(4):
        session.step()
    session.deliver(session.rank.on_message(AbortRequest("a", 0), session.now))
    last = session.streams["a"].last
    assert last is not None and (last.num_rounds, last.num_accepted) == (3, 9)


def test_a_dead_ingress_takes_its_requests_with_it_and_hears_nothing() -> None:
    session = Session(make_rank())
    other = endpoint("ingress-1", "ingress")
    session.submit(admitted("a", PROMPT, 9))
    session.submit(admitted("b", PROMPT, 9, reply_to=other))
    session.rank.on_message(reserve("later", 5, 5), session.now)
    session.step()
    out = session.rank.abort_ingress(INGRESS.name)
    assert not any(isinstance(m, TokenDeltas) for _, m in out)
    assert [m.request_ids for _, m in out if isinstance(m, CloseDraft)] == [("a",)]
    assert session.rank.book.desk.num_reservations == 0
    session.deliver(out)
    session.run()
    assert session.streams["b"].tokens == oracle(PROMPT, 9)[0]
    assert session.rank.check_idle() == []


def test_waiting_requests_start_in_order_of_arrival() -> None:
    session = Session(make_rank(max_running=1))
    for name in "abc":
        session.submit(admitted(name, PROMPT, 4))
    order: list[str] = []
    while (plan := session.step()) is not None:
        order += [name for name in plan.request_ids if name not in order]
    assert order == ["a", "b", "c"]


def test_the_integrity_check_names_what_is_left_behind() -> None:
    rank = make_rank()
    lease = rank.book.pool.lease(4)
    assert lease is not None
    rank.book.table.wants_draft[0] = True
    rank.book.table._free.pop()
    rank.book.prefilling = [None]  # type: ignore[list-item]
    rank.set_drafters([DRAFTER])
    rank.book.drafts.drafters[DRAFTER.name].num_requests = 2
    problems = rank.check_idle()
    assert [problem.split()[0] for problem in problems] == ["1", "1", "0", "a", "2"]
    assert "leases are open" in problems[0]
    assert "bound to drafter-0" in problems[4]
    assert np.array_equal(lease.blocks, [0])
