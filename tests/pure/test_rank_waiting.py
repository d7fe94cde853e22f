"""How long a rank waits for blocks: never beyond a bound, rarely for a drafter that disappoints, and in company."""

import numpy as np
import pytest

from actors.core.drafting import DrafterState
from actors.core.messages import CommitBatch, ProposalBatch
from tests.pure.rank_harness import (
    Session,
    admitted,
    prefilled,
    proposal_for,
    two_requests_two_drafters,
)
from tests.pure.scripted_drafter import DRAFTER, ScriptedDrafter

PROMPT = [3, 1, 4, 1, 5]


def test_the_rank_waits_for_a_block_until_its_deadline_and_then_runs_plainly() -> None:
    session, _ = prefilled(max_wait_s=0.25)
    rank, asked_at = session.rank, session.now
    assert rank.plan_step(asked_at) is None
    assert rank.waiting_for_proposals
    assert rank.deadline == pytest.approx(asked_at + 0.25)
    assert rank.plan_step(asked_at + 0.249) is None
    plan = rank.plan_step(asked_at + 0.25)
    assert plan is not None and plan.verify_len.tolist() == [0]
    assert not rank.waiting_for_proposals
    assert rank.counters.num_late == 1
    rank.apply(plan, session.target.step(plan), asked_at + 0.3, 0.05)
    assert rank.report is not None
    assert rank.report.draft_wait_s == pytest.approx(0.25)


def test_after_a_miss_the_rank_does_not_wait_again_until_it_hears_of_the_drafter() -> None:
    session, commit = prefilled(max_wait_s=0.25)
    rank = session.rank
    session.now += 0.25
    late = proposal_for(session, commit)
    for _ in range(5):
        assert session.step(drafts=False) is not None, "no second wait"
    rank.on_message(late, session.now)  # for an old length, but a sign of life
    assert rank.book.drafts.dropped["stale"] == 1
    assert rank.plan_step(session.now) is None
    assert rank.waiting_for_proposals


def test_waiting_for_a_drafter_that_is_always_late_gets_rare() -> None:
    session, _ = prefilled(max_wait_s=0.25)
    session.submit(admitted("b", PROMPT, 100))
    waits, steps, commit = 0, 0, None
    while steps < 80 and not session.rank.is_idle:
        if session.rank.plan_step(session.now) is not None:
            assert session.rank._in_flight is not None
            plan = session.rank._in_flight.plan
            steps += 1
            out = session.rank.apply(plan, session.target.step(plan), session.now + 0.01, 0.01)
            session.now += 0.01
            late = commit
            commit = next((m for _, m in out if isinstance(m, CommitBatch)), None)
            if late is not None:  # always one step behind
                empty = proposal_of_nothing(session, late)
                session.rank.on_message(empty, session.now)
        else:
            waits += 1
            assert session.rank.deadline is not None
            session.now = session.rank.deadline
    assert steps > 50
    assert waits <= 8, f"{waits} full waits in {steps} steps"


def proposal_of_nothing(session: Session, commit: CommitBatch) -> ProposalBatch:
    gamma, count = session.rank.limits.gamma, len(commit.request_ids)
    return ProposalBatch(
        DRAFTER.name,
        commit.request_ids,
        commit.generations,
        commit.committed_lens,
        np.zeros((count, gamma), np.int32),
        np.full((count, gamma), 0.5, np.float32),
        np.zeros((count, gamma, 1), np.int32),
        np.ones((count, gamma, 1), np.float32),
        0.0,
    )


def test_the_backoff_doubles_and_a_usable_block_ends_it() -> None:
    state = DrafterState(DRAFTER, 0)
    allowed = []
    for _ in range(9):
        state.miss(100, 0.25)
        assert not state.may_wait(10**9), "silent since its miss"
        state.heard = True
        allowed.append(state.retry_step - 100)
        assert not state.may_wait(state.retry_step - 1)
        assert state.may_wait(state.retry_step)
    assert allowed == [0, 1, 3, 7, 15, 31, 63, 64, 64]
    state.misses = 0
    assert state.may_wait(0)


def test_ready_rounds_do_not_stand_still_for_a_much_slower_drafter() -> None:
    session, other = two_requests_two_drafters(max_wait_s=0.25)
    rank = session.rank
    drafters = {d.name: ScriptedDrafter(d, 3, 0.0, session.drafter.rng) for d in (DRAFTER, other)}
    for name in "ab":
        session.rank.on_message(admitted(name, PROMPT, 60), 0.0)
    mail: list[tuple[float, ProposalBatch]] = []
    now, rounds = 0.0, {"a": 0, "b": 0}
    while now < 3.0:
        for _, batch in [m for m in mail if m[0] <= now]:
            rank.on_message(batch, now)
        mail = [m for m in mail if m[0] > now]
        plan = rank.plan_step(now)
        if plan is None:
            if rank.is_idle:
                break
            assert rank.deadline is not None
            now = min([rank.deadline, *(at for at, _ in mail)])
            continue
        for name in plan.request_ids:
            rounds[name] += 1
        now += 0.02
        for to, message in rank.apply(plan, session.target.step(plan), now, 0.02):
            if isinstance(message, CommitBatch):
                batch = drafters[to.name].advance(message)
                if batch is not None:
                    mail.append((now + (0.005 if to.name == "drafter-0" else 0.2), batch))
        if "a" not in rank.book.live or "b" not in rank.book.live:
            break
    fast, slow = max(rounds.values()), min(rounds.values())
    assert fast >= 3 * slow, rounds


def test_the_batch_stays_together_for_a_block_that_is_almost_there() -> None:
    session, _ = two_requests_two_drafters()
    rank = session.rank
    rank.step_time_s = 0.02
    for name in "ab":
        session.rank.on_message(admitted(name, PROMPT, 60), 0.0)
    plan = rank.plan_step(0.0)
    assert plan is not None
    out = rank.apply(plan, session.target.step(plan), 0.0, 0.02)
    batches = {
        to.name: ScriptedDrafter(to, 3, 0.0, session.drafter.rng).advance(m)
        for to, m in out
        if isinstance(m, CommitBatch)
    }
    for state in rank.book.drafts.drafters.values():
        state.turnaround_s = 0.01
    assert batches["drafter-0"] is not None and batches["drafter-1"] is not None
    rank.on_message(batches["drafter-0"], 0.008)
    assert rank.plan_step(0.008) is None, "the other one is due in 2 ms"
    rank.on_message(batches["drafter-1"], 0.011)
    plan = rank.plan_step(0.011)
    assert plan is not None and plan.num_requests == 2


def test_prefill_goes_on_while_blocks_are_far_away() -> None:
    session, _ = prefilled(max_batch_tokens=8)
    session.rank.on_message(admitted("long", list(range(30)), 5), session.now)
    plan = session.rank.plan_step(session.now)
    assert plan is not None
    assert plan.request_ids == ("long",), "drafting may take up to its deadline"
    assert plan.batch_tokens == 8
