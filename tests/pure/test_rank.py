"""A rank with a scripted target and drafter: what its streams get, however speculation goes."""

import numpy as np
import pytest

from actors.core.messages import (
    AbortRequest,
    CloseDraft,
    CommitBatch,
    ReservationReply,
    StepReport,
    TokenDeltas,
)
from actors.core.rank import UnexpectedMessageError
from actors.core.rank_report import rank_stats
from tests.pure.rank_harness import Session, admitted, make_rank, reserve
from tests.pure.scripted_drafter import ALLOCATOR, INGRESS, endpoint, oracle, true_token

PROMPT = [3, 1, 4, 1, 5]


def test_a_stream_equals_plain_decoding_whatever_the_drafter_says() -> None:
    for error in (0.0, 0.3, 1.0):
        session = Session(make_rank(), error)
        session.submit(admitted("a", PROMPT, 20))
        session.run()
        assert (session.streams["a"].tokens, session.streams["a"].reason) == oracle(PROMPT, 20)
        assert session.rank.check_idle() == []


def test_a_perfect_drafter_is_accepted_in_full() -> None:
    session = Session(make_rank(gamma=3), error=0.0)
    session.submit(admitted("a", PROMPT, 17))
    session.run()
    # One token from the prompt, then rounds of three drafts and a bonus.
    last = session.streams["a"].last
    assert last is not None
    assert (last.num_rounds, last.num_accepted, last.num_scheduled) == (4, 12, 12)
    assert session.rank.counters.acceptance.acceptance_length == 4.0


def test_counters_are_kept_apart_per_position() -> None:
    session = Session(make_rank(gamma=3), error=0.5)
    for name in "abcd":
        session.submit(admitted(name, [ord(name) % 50, 2], 25))
    session.run()
    counters = session.rank.counters.acceptance
    assert (counters.proposed >= counters.scheduled).all()
    assert (counters.scheduled >= counters.accepted).all()
    assert (np.diff(counters.accepted) <= 0).all()
    assert counters.num_committed == 4 * 24  # the first token of each came from its prompt
    streams = session.streams.values()
    assert sum(s.last.num_scheduled for s in streams if s.last) == counters.scheduled.sum()


def test_requests_beside_each_other_do_not_disturb_each_other() -> None:
    session = Session(make_rank(max_running=3, max_batch_tokens=9), error=0.3)
    prompts = {f"r{i}": [i, *range(i, i + 3 * i)] for i in range(1, 8)}
    for name, prompt in prompts.items():
        session.submit(admitted(name, prompt, 10))
    session.run()
    for name, prompt in prompts.items():
        assert (session.streams[name].tokens, session.streams[name].reason) == oracle(prompt, 10)


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 15, 16, 17, 24])
def test_prompts_around_the_chunk_boundary(prompt_len: int) -> None:
    session = Session(make_rank(max_batch_tokens=8, block_size=4), error=0.0)
    prompt = [(7 * i) % 50 for i in range(prompt_len)]
    session.submit(admitted("a", prompt, 6))
    session.run()
    assert session.streams["a"].tokens == oracle(prompt, 6)[0]
    prefill = [plan for plan in session.target.plans if plan.context_len[0] < prompt_len]
    assert len(prefill) == -(-prompt_len // 8)
    assert [bool(plan.samples[0]) for plan in prefill] == [False] * (len(prefill) - 1) + [True]


def test_prefill_advances_beside_running_rounds_and_never_stops_them() -> None:
    session = Session(make_rank(max_batch_tokens=8, max_running=8), error=0.0)
    for i in range(7):
        session.submit(admitted(f"d{i}", [i], 60))
    for _ in range(8):
        session.step()
    session.submit(admitted("long", list(range(40)), 2))
    for _ in range(12):
        before = {name: len(session.streams[name].tokens) for name in ("d0", "d6")}
        left = [r.num_prefill_left for r in session.rank.book.prefilling]
        session.step()
        session.step()
        after = [r.num_prefill_left for r in session.rank.book.prefilling]
        assert not after or not left or sum(after) < sum(left), "prefill stands still"
        for name, count in before.items():
            assert len(session.streams[name].tokens) > count, f"{name} starves"
    session.run()
    assert session.streams["long"].tokens == oracle(list(range(40)), 2)[0]


def test_more_running_requests_than_fit_take_turns() -> None:
    session = Session(make_rank(max_batch_tokens=4, max_running=8, gamma=3), error=0.2)
    for i in range(8):
        session.submit(admitted(f"d{i}", [i], 9))
    session.run()
    for i in range(8):
        assert session.streams[f"d{i}"].tokens == oracle([i], 9)[0]
    rounds = [session.streams[f"d{i}"].last for i in range(8)]
    assert all(last is not None for last in rounds)


def test_the_length_cap_inside_an_accepted_run() -> None:
    for max_new in range(1, 10):
        session = Session(make_rank(gamma=3), error=0.0)
        session.submit(admitted("a", PROMPT, max_new))
        session.run()
        assert (session.streams["a"].tokens, session.streams["a"].reason) == oracle(PROMPT, max_new)
        for plan in session.target.plans:
            # Nothing is verified that could never be emitted, so the lease is enough.
            assert plan.positions.max() <= len(PROMPT) + max_new - 2 or max_new == 1


@pytest.mark.parametrize("position", range(8))
def test_a_stop_token_at_every_draft_position(position: int) -> None:
    tokens = oracle(PROMPT, 30)[0]
    stop = tokens[position]
    expected = tokens[: tokens.index(stop) + 1]
    session = Session(make_rank(gamma=3), error=0.0)
    session.submit(admitted("a", PROMPT, 30, stops=[stop]))
    session.run()
    assert session.streams["a"].tokens == expected
    assert session.streams["a"].reason == "stop"
    last = session.streams["a"].last
    assert last is not None and last.num_accepted <= len(expected) - 1
    assert session.rank.check_idle() == []


def test_an_earlier_stop_wins_over_a_later_cap_and_a_stop_on_the_cap_is_a_stop() -> None:
    tokens = oracle(PROMPT, 30)[0]
    for max_new in (4, 6):
        stop = tokens[3]
        assert stop not in tokens[:3]
        session = Session(make_rank(gamma=3), error=0.0)
        session.submit(admitted("a", PROMPT, max_new, stops=[stop]))
        session.run()
        assert (session.streams["a"].tokens, session.streams["a"].reason) == (tokens[:4], "stop")


@pytest.mark.parametrize("num_prior", range(1, 8))
def test_a_replayed_journal_goes_on_where_it_was(num_prior: int) -> None:
    tokens = oracle(PROMPT, 8)[0]
    session = Session(make_rank(), error=0.2)
    session.submit(admitted("a", PROMPT + tokens[:num_prior], 8, num_prior=num_prior, generation=3))
    session.run()
    stream = session.streams["a"]
    assert (stream.first_index, stream.tokens, stream.reason) == (
        num_prior,
        tokens[num_prior:],
        "length",
    )


def test_a_replay_with_nothing_left_ends_at_once() -> None:
    tokens = oracle(PROMPT, 4)[0]
    session = Session(make_rank())
    session.submit(admitted("full", PROMPT + tokens, 4, num_prior=4))
    session.submit(admitted("stopped", PROMPT + tokens, 9, num_prior=4, stops=[tokens[3]]))
    assert session.streams["full"].reason == "length"
    assert session.streams["stopped"].reason == "stop"
    assert session.target.plans == []
    assert session.rank.check_idle() == []


def test_a_request_without_speculation_never_reaches_a_drafter() -> None:
    session = Session(make_rank(), error=0.0)
    session.submit(admitted("plain", PROMPT, 6, speculation=False))
    session.submit(admitted("fast", PROMPT, 6))
    session.run()
    assert session.streams["plain"].tokens == session.streams["fast"].tokens
    commits = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    assert {name for commit in commits for name in commit.request_ids} == {"fast"}
    last = session.streams["plain"].last
    assert last is not None and (last.num_rounds, last.num_scheduled) == (5, 0)


def test_without_a_drafter_the_rank_decodes_plainly_and_never_waits() -> None:
    session = Session(make_rank())
    session.rank.set_drafters([])
    session.submit(admitted("a", PROMPT, 6))
    while not session.rank.is_idle:
        assert session.step() is not None
    assert session.streams["a"].tokens == oracle(PROMPT, 6)[0]


def test_commits_carry_the_features_of_committed_rows_only() -> None:
    # The scripted drafter checks positions and tokens of every feature row it gets.
    session = Session(make_rank(max_batch_tokens=8), error=0.4)
    session.submit(admitted("a", list(range(19)), 12))
    session.run()
    commits = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    prompt_part = [c for c in commits if c.committed_lens[0] <= 19]
    assert len(prompt_part) == 2
    assert not any(c.wants_block.any() for c in prompt_part)
    assert session.drafter.contexts == {}, "CloseDraft was sent"


def test_a_finished_request_is_closed_at_its_drafter_and_asks_for_nothing() -> None:
    session = Session(make_rank(), error=0.0)
    session.submit(admitted("a", PROMPT, 9))
    session.run()
    closed = [m for _, m in session.sent if isinstance(m, CloseDraft)]
    assert closed == [CloseDraft("target-0", ("a",))]
    kinds = [type(m) for _, m in session.sent]
    assert kinds.index(CloseDraft) > max(i for i, k in enumerate(kinds) if k is CommitBatch)


def test_deltas_of_one_ingress_travel_together() -> None:
    session = Session(make_rank(), error=0.0)
    other = endpoint("ingress-1", "ingress")
    for name, reply_to in (("a", INGRESS), ("b", INGRESS), ("c", other)):
        session.submit(admitted(name, PROMPT, 9, reply_to=reply_to))
    session.sent.clear()
    session.step()
    deltas = [(to.name, m) for to, m in session.sent if isinstance(m, TokenDeltas)]
    assert {name: [d.request_id for d in m.deltas] for name, m in deltas} == {
        "ingress-0": ["a", "b"],
        "ingress-1": ["c"],
    }
    assert len(deltas) == 2


def test_reports_add_up() -> None:
    session = Session(make_rank(max_batch_tokens=8), error=0.3)
    session.rank.allocator = ALLOCATOR
    for i in range(5):
        session.submit(admitted(f"r{i}", list(range(i, i + 9)), 8))
    session.run()
    reports = [m for to, m in session.sent if to == ALLOCATOR and isinstance(m, StepReport)]
    assert [report.step for report in reports] == list(range(len(reports)))
    for report in reports:
        assert report.batch_tokens == (
            report.num_requests + report.num_prefill_tokens + report.budget_used
        )
        assert report.survivals.shape == (report.num_requests, 3)
        assert report.num_scheduled.sum() == report.budget_used
    assert sum(r.num_prefill_tokens for r in reports) == 5 * 9
    assert sum(r.num_committed for r in reports) == 5 * 8
    idle = session.rank.report_idle()
    assert [(to, m.step, m.batch_tokens) for to, m in idle if isinstance(m, StepReport)] == [
        (ALLOCATOR, len(reports), 0)
    ]
    assert session.rank.report_idle() == [], "once is enough"


def test_an_engine_that_fails_ends_its_requests_with_an_error() -> None:
    session = Session(make_rank())
    session.submit(admitted("a", PROMPT, 9))
    session.step()
    session.submit(admitted("b", PROMPT, 9))
    plan = session.rank.plan_step(session.now)
    assert plan is not None
    session.deliver(session.rank.on_message(AbortRequest("a", 0), session.now))
    session.deliver(session.rank.fail(plan, "out of memory"))
    assert session.streams["b"].reason == "error"
    assert session.streams["b"].last is not None
    assert session.streams["b"].last.error == "out of memory"
    assert session.rank.check_idle() == []


def test_a_message_for_somebody_else_is_refused() -> None:
    rank = make_rank()
    with pytest.raises(UnexpectedMessageError, match="ReservationReply"):
        rank.on_message(ReservationReply("target-0", "a", True), 0.0)


def test_a_reservation_is_a_place_in_line_and_blocks_are_taken_as_they_are_needed() -> None:
    rank = make_rank(num_blocks=10, block_size=4)
    ((to, reply),) = rank.on_message(reserve("a", 5, 11), 0.0)
    assert to == INGRESS and isinstance(reply, ReservationReply) and reply.granted
    assert rank.on_message(admitted("a", PROMPT, 11), 0.0) == []
    assert (rank.book.desk.num_reservations, rank.book.pool.num_free) == (0, 10)
    assert rank.plan_step(0.0) is not None
    assert rank.book.pool.num_free == 8
    assert true_token(PROMPT) >= 0


def test_a_rank_tells_whoever_asks_what_it_has_done_and_what_it_holds() -> None:
    session = Session(make_rank(), error=0.0)
    before = rank_stats(session.rank)
    assert (before["acceptance_length"], before["is_idle"], before["last_rule"]) == (None, True, "")
    session.submit(admitted("a", PROMPT, 30))
    session.step()
    session.step()
    during = rank_stats(session.rank)
    assert (during["num_running"], during["is_idle"], during["num_steps"]) == (1, False, 2)
    assert during["num_free_blocks"] < before["num_free_blocks"]
    session.run()
    after = rank_stats(session.rank)
    assert after["acceptance_length"] > 1 and after["num_committed"] == 30
    assert after["num_free_blocks"] == before["num_free_blocks"] == after["num_blocks"]
