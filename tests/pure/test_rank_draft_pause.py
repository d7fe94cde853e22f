"""A rank whose drafting does not pay: nobody is asked, waited for or called late, and contexts catch up in time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actors.core.draft_feed import MOST_SILENT_S
from actors.core.draft_pause import LAG_STEPS, MIN_PAUSE, MIN_ROWS, PROBE_EVERY, DraftPause
from actors.core.local_policy import LocalPolicy
from actors.core.messages import AbortRequest, CommitBatch
from actors.drafter import EXPIRE_AFTER_S
from tests.pure.draft_load import measured
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER, ScriptedDrafter, endpoint, oracle

CROWD = 24


def crowded(
    crowd: int = CROWD, max_new: int = 90, *, has_cache: bool = True, **sampling: object
) -> Session:
    """A session of many streams, run until its rank has stopped asking for blocks."""
    rank = make_rank(
        lagged(),
        num_blocks=2000,
        max_running=40,
        max_waiting=40,
        max_batch_tokens=256,
        max_model_len=256,
        prefix_cache=has_cache,
    )
    session = Session(rank)
    for i in range(crowd):
        session.submit(admitted(f"r{i}", [i, 3, 1], max_new, **sampling))
    for _ in range(25):
        if rank.counters.num_draft_pauses:
            return session
        session.step()
    raise AssertionError("it drafts on")


def lagged() -> LocalPolicy:
    """The policy of a rank that was profiled: drafting pays alone and not in a crowd."""
    policy = LocalPolicy("lagged")
    curve = measured().curve
    assert curve is not None
    policy.times.measured(curve)
    return policy


def pause_of(session: Session) -> DraftPause:
    assert isinstance(session.rank.decider.drafting, DraftPause)
    return session.rank.decider.drafting


def commits(session: Session, since: int = 0) -> list[CommitBatch]:
    return [m for _, m in session.sent[since:] if isinstance(m, CommitBatch)]


def test_in_a_pause_nobody_is_asked_waited_for_late_or_fed() -> None:
    session = crowded()
    rank, since = session.rank, len(session.sent)
    late = rank.counters.num_late
    for _ in range(MIN_PAUSE):
        plan = session.step(drafts=False)
        assert plan is not None, "there is nothing to wait for"
        assert plan.verify_len.sum() == 0 and plan.num_requests == CROWD
        assert rank.report is not None
        assert (rank.report.budget_rule, rank.report.draft_wait_s) == ("drafting_paused", 0.0)
    assert rank.counters.num_late == late
    assert rank.counters.num_unasked == CROWD * MIN_PAUSE
    assert commits(session, since) == []


def test_a_row_is_told_of_what_was_held_back_before_its_probe_and_others_are_not() -> None:
    session = crowded()
    since = len(session.sent)
    while not session.rank.counters.num_draft_probes:
        session.step()
    (told,) = commits(session, since)
    assert told.wants_block.all() and len(told.request_ids) == MIN_ROWS
    assert np.diff(told.cu_feature_len).min() >= PROBE_EVERY


def test_no_context_lacks_more_than_a_bound_however_long_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.core.draft_feed.MOST_HELD_BACK", 10)
    session = crowded()
    table, since = session.rank.book.table, len(session.sent)
    for _ in range(MIN_PAUSE + 10):
        session.step()
        lacking = (table.committed_len - 1 - table.draft_len)[table.is_running]
        assert lacking.max() < 10
    sizes = [np.diff(batch.cu_feature_len) for batch in commits(session, since)]
    assert not any(batch.wants_block.any() for batch in commits(session, since))
    assert {int(size) for size in np.concatenate(sizes)} == {10}, "told of ten at once"


def test_no_row_is_passed_over_for_so_long_that_its_drafter_forgets_it() -> None:
    assert 2 * MOST_SILENT_S < EXPIRE_AFTER_S, "a step may take long"
    session = crowded()
    for _ in range(4):
        session.step()
    since = len(session.sent)
    session.now += MOST_SILENT_S
    session.step()
    (told,) = commits(session, since)
    assert len(told.request_ids) == CROWD and not told.wants_block.any()
    session.step()
    assert len(commits(session, since)) == 1


def test_a_prompt_is_told_piece_by_piece_as_it_is_computed() -> None:
    session = Session(make_rank(lagged(), max_batch_tokens=16))
    session.submit(admitted("a", list(range(40)), 30))
    for _ in range(3):
        session.step()
    told = [np.diff(batch.cu_feature_len).tolist() for batch in commits(session)]
    assert told == [[16], [16], [8]]


def test_without_a_cache_of_features_every_step_is_told() -> None:
    session = crowded(has_cache=False)
    since = len(session.sent)
    for _ in range(MIN_PAUSE):
        session.step()
    told = commits(session, since)
    assert len(told) == MIN_PAUSE
    assert not any(batch.wants_block.any() for batch in told)
    assert all(len(batch.request_ids) == CROWD == len(batch.features) for batch in told)


def test_rows_whose_drafts_were_verified_are_told_of_it_in_a_pause_too() -> None:
    session = crowded()
    last = session.decisions[-1]
    told = commits(session)[-1]
    assert pause_of(session).is_paused and last.verify_len.any()
    verified = {r for r, n in zip(last.request_ids, last.verify_len, strict=True) if n}
    assert verified <= set(told.request_ids) and not told.wants_block.any()


def test_every_stream_is_the_oracles_through_pauses_and_probes() -> None:
    session = crowded()  # the scripted drafter complains about any hole in its contexts
    session.run()
    for i in range(CROWD):
        assert session.streams[f"r{i}"].tokens == oracle([i, 3, 1], 90)[0]
    counters = session.rank.counters
    assert counters.num_draft_pauses >= 1 and counters.num_draft_probes >= 1
    assert session.rank.check_idle() == []
    assert counters.num_late == 0


def test_a_probe_waits_for_its_own_rows_only() -> None:
    session = crowded()
    rank = session.rank
    while not rank.counters.num_draft_probes:
        assert session.step() is not None
    table = rank.book.table
    assert int(table.has_draft.sum()) == MIN_ROWS
    plan = session.step()
    assert plan is not None and plan.num_requests == CROWD
    decision = session.decisions[-1]
    assert int(decision.has_draft.sum()) == MIN_ROWS
    reasons = [decision.cut_by(row) for row in range(CROWD)]
    assert reasons.count("unasked") == CROWD - MIN_ROWS and "fallback" not in reasons
    assert rank.counters.num_late == 0


def test_the_pause_can_be_explained() -> None:
    session = crowded()
    session.step()
    decision = session.decisions[-1]
    row = decision.request_ids.index("r3")
    assert (decision.choice.rule, decision.cut_by(row)) == ("drafting_paused", "unasked")
    assert decision.verify_len[row] == 0


def test_when_the_crowd_has_gone_the_last_stream_is_drafted_for_again() -> None:
    session = crowded(max_new=200)
    for _ in range(MIN_PAUSE):
        session.step()
    for i in range(1, CROWD):
        session.deliver(session.rank.on_message(AbortRequest(f"r{i}", 0), session.now))
    steps = 0
    while pause_of(session).is_paused:
        session.step()
        steps += 1
        assert steps <= MIN_PAUSE + MIN_ROWS + LAG_STEPS + 2
    accepted = session.rank.counters.acceptance.accepted.sum()
    for _ in range(20):
        session.step()
    assert session.rank.counters.acceptance.accepted.sum() > accepted
    session.run()
    assert session.streams["r0"].tokens == oracle([0, 3, 1], 200)[0]


def test_requests_that_join_during_a_pause_are_not_drafted_for() -> None:
    session = crowded()
    since = len(session.sent)
    prior = oracle([9, 9], 50)[0][:20]
    session.submit(admitted("new", [5, 4], 30))
    session.submit(admitted("replayed", [9, 9, *prior], 50, num_prior=20, generation=2))
    session.step()
    assert not any(batch.wants_block.any() for batch in commits(session, since))
    session.step()
    assert session.rank.counters.num_late == 0
    session.run()
    assert session.streams["new"].tokens == oracle([5, 4], 30)[0]
    assert prior + session.streams["replayed"].tokens == oracle([9, 9], 50)[0]


@pytest.mark.parametrize("epoch", ["1", "2"])
def test_only_a_new_incarnation_of_the_drafter_ends_the_pause(epoch: str) -> None:
    session = crowded()
    me = endpoint(DRAFTER.name, "drafter", epoch)
    session.rank.set_drafters([me])
    assert pause_of(session).is_paused == (epoch == DRAFTER.epoch)
    if epoch != DRAFTER.epoch:
        session.drafter = ScriptedDrafter(me, 3, 0.3, random.Random(1))
    since = len(session.sent)
    session.step()
    told = commits(session, since)
    assert bool(told) == (epoch != DRAFTER.epoch)
    assert all(batch.wants_block.all() for batch in told)
    session.run()
    assert session.streams["r0"].tokens == oracle([0, 3, 1], 90)[0]


def test_without_a_drafter_a_pause_changes_nothing_and_is_not_named() -> None:
    session = crowded()
    session.rank.set_drafters([])
    session.step()  # planned with what was decided before
    session.step()
    assert session.rank.report is not None and session.rank.report.budget_rule == "no_drafts"
    unasked = session.rank.counters.num_unasked
    session.run()
    assert session.rank.counters.num_unasked == unasked
    assert session.streams["r0"].tokens == oracle([0, 3, 1], 90)[0]


def test_requests_without_speculation_are_rounds_that_are_never_asked_nor_counted() -> None:
    session = Session(make_rank(lagged(), max_running=12, max_batch_tokens=64))
    for i in range(8):
        session.submit(admitted(f"r{i}", [i], 60, speculation=False))
    session.submit(admitted("fast", [40], 60))
    for _ in range(6):
        session.step()
    decision = session.decisions[-1]
    row = decision.request_ids.index("fast")
    assert [decision.cut_by(r) for r in range(9) if r != row] == ["fallback"] * 8
    session.run()
    assert session.streams["fast"].tokens == oracle([40], 60)[0]


def test_one_stream_is_drafted_for_to_its_end() -> None:
    session = Session(make_rank(lagged()))
    session.submit(admitted("a", [3, 1], 100))
    session.run()
    assert session.rank.counters.num_draft_pauses == 0
    assert all(b.wants_block.all() for b in commits(session))


def test_blocks_lost_in_a_probe_are_late_once_and_the_rank_goes_on() -> None:
    session = crowded()
    rank = session.rank
    for _ in range(2 * PROBE_EVERY):
        if session.step(drafts=False) is None:
            assert rank.deadline is not None
            session.now = rank.deadline
    assert rank.counters.num_draft_probes >= 1
    assert rank.counters.num_late == MIN_ROWS * rank.counters.num_draft_probes
    session.run()


def test_with_policy_none_no_block_is_ever_asked_for() -> None:
    session = Session(make_rank(LocalPolicy("none")))
    session.submit(admitted("a", [3, 1], 20))
    session.run()
    assert not any(b.wants_block.any() for b in commits(session))
    assert np.array_equal(session.streams["a"].tokens, oracle([3, 1], 20)[0])
    assert {d.choice.rule for d in session.decisions if len(d.caps)} <= {"none", "no_drafts"}
