"""Proposals: matched, dropped, waited for within bounds; drafters that die, restart and share the work."""

from dataclasses import replace

import numpy as np
import pytest

from actors.core.drafting import DrafterState
from actors.core.messages import CommitBatch, Endpoint, ProposalBatch
from tests.pure.rank_harness import (
    DRAFTER,
    ScriptedDrafter,
    Session,
    admitted,
    endpoint,
    make_rank,
    oracle,
)

PROMPT = [3, 1, 4, 1, 5]


def prefilled(**overrides: object) -> tuple[Session, CommitBatch]:
    """A session whose request "a" waits for its first block, and the commit that asked for it."""
    session = Session(make_rank(**overrides), error=0.0)
    session.submit(admitted("a", PROMPT, 30))
    session.step(drafts=False)
    (commit,) = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    return session, commit


def proposal_for(session: Session, commit: CommitBatch) -> ProposalBatch:
    drafter = ScriptedDrafter(DRAFTER, session.rank.limits.gamma, 0.0, session.drafter.rng)
    batch = drafter.advance(commit)
    assert batch is not None
    return batch


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


def test_a_block_in_time_is_verified() -> None:
    session, commit = prefilled()
    session.rank.on_message(proposal_for(session, commit), session.now + 0.1)
    plan = session.rank.plan_step(session.now + 0.1)
    assert plan is not None and plan.verify_len.tolist() == [3]
    assert plan.draft is not None
    assert plan.draft.q_ids[0, :, 0].tolist() == plan.token_ids[1:].tolist()


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


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("committed_lens", np.array([5], np.int32), "stale"),
        ("committed_lens", np.array([7], np.int32), "stale"),
        ("generations", np.array([1], np.int32), "stale"),
        ("request_ids", ("b",), "stale"),
        ("drafter", "drafter-9", "unknown drafter"),
        ("confidences", np.full((1, 3), np.nan, np.float32), "malformed"),
        ("confidences", np.full((1, 3), 1.5, np.float32), "malformed"),
        ("confidences", np.full((1, 2), 0.5, np.float32), "malformed"),
        ("draft_token_ids", np.array([[1, 2, 50]], np.int32), "malformed"),
        ("draft_token_ids", np.array([[1, 2, -1]], np.int32), "malformed"),
        ("generations", np.array([0, 0], np.int32), "malformed"),
    ],
)
def test_a_proposal_for_anything_else_is_dropped_and_counted(
    field: str, value: object, reason: str
) -> None:
    session, commit = prefilled()
    good = proposal_for(session, commit)
    session.rank.on_message(replace(good, **{field: value}), session.now)
    assert session.rank.book.drafts.dropped == {reason: 1}
    assert not session.rank.book.table.has_draft.any()
    session.rank.on_message(good, session.now)
    assert session.rank.book.table.has_draft.any()


def test_repeated_proposals_count_once() -> None:
    session, commit = prefilled()
    good = proposal_for(session, commit)
    twice = replace(
        good,
        request_ids=good.request_ids * 2,
        **{
            name: np.concatenate((getattr(good, name), getattr(good, name)))
            for name in (
                "generations",
                "committed_lens",
                "draft_token_ids",
                "confidences",
                "q_ids",
                "q_probs",
            )
        },
    )
    session.rank.on_message(twice, session.now)
    session.rank.on_message(good, session.now)
    assert session.rank.book.drafts.dropped["stale"] == 2
    assert session.rank.plan_step(session.now) is not None


def test_a_proposal_that_arrives_during_the_plain_step_does_not_survive_it() -> None:
    session, commit = prefilled(max_wait_s=0.0)
    late = proposal_for(session, commit)
    plan = session.rank.plan_step(session.now)
    assert plan is not None
    session.rank.on_message(late, session.now)  # its length is still the committed one
    session.deliver(session.rank.apply(plan, session.target.step(plan), session.now, 0.01), False)
    assert not session.rank.book.table.has_draft.any()
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 30)[0]


def test_a_draft_is_verified_once_and_never_again() -> None:
    session, commit = prefilled(max_wait_s=0.25)
    session.rank.on_message(proposal_for(session, commit), session.now)
    plan = session.step(drafts=False)
    assert plan is not None and plan.verify_len.tolist() == [3]
    session.now += 0.25
    plan = session.step(drafts=False)
    assert plan is not None and plan.verify_len.tolist() == [0], "its next block was lost"


def test_a_wider_support_is_kept_whole() -> None:
    session, commit = prefilled()
    good = proposal_for(session, commit)
    wide = replace(
        good,
        q_ids=np.arange(15, dtype=np.int32).reshape(1, 3, 5),
        q_probs=np.full((1, 3, 5), 0.2, np.float32),
    )
    session.rank.on_message(wide, session.now)
    plan = session.rank.plan_step(session.now)
    assert plan is not None and plan.draft is not None
    assert plan.draft.q_ids.tolist() == wide.q_ids.tolist()
    assert plan.draft.q_probs.tolist() == wide.q_probs.tolist()


def two_requests_two_drafters(**overrides: object) -> tuple[Session, Endpoint]:
    session = Session(make_rank(**overrides), error=0.0)
    other = endpoint("drafter-1", "drafter")
    session.rank.set_drafters([DRAFTER, other])
    return session, other


def test_requests_are_spread_over_drafters_and_stay_where_they_are() -> None:
    session, _ = two_requests_two_drafters()
    session.rank.on_message(admitted("a", PROMPT, 30), 0.0)
    plan = session.rank.plan_step(0.0)
    for name in "bcdef":
        session.rank.on_message(admitted(name, PROMPT, 30), 0.0)
    homes: dict[str, set[str]] = {}
    for step in range(4):
        assert plan is not None
        for to, message in session.rank.apply(plan, session.target.step(plan), step, 0.01):
            if isinstance(message, CommitBatch):
                for name in message.request_ids:
                    homes.setdefault(name, set()).add(to.name)
        plan = session.rank.plan_step(step + 0.9)
    assert all(len(home) == 1 for home in homes.values())
    counts = [sum(home == {name} for home in homes.values()) for name in ("drafter-0", "drafter-1")]
    assert counts == [3, 3]


def test_a_restarted_drafter_owes_nothing_and_a_lost_one_is_replaced() -> None:
    session, _ = prefilled()
    rank = session.rank
    assert rank.plan_step(session.now) is None
    rank.set_drafters([replace(DRAFTER, epoch="2")])
    plan = rank.plan_step(session.now)
    assert plan is not None and plan.verify_len.tolist() == [0]
    out = rank.apply(plan, session.target.step(plan), session.now, 0.01)
    ((to, commit),) = [(to, m) for to, m in out if isinstance(m, CommitBatch)]
    assert to.epoch == "2"
    assert commit.first_positions.tolist() == [5], "its context starts where it came in"

    replacement = endpoint("drafter-7", "drafter")
    rank.set_drafters([replacement])
    plan = rank.plan_step(session.now)
    assert plan is not None
    out = rank.apply(plan, session.target.step(plan), session.now, 0.01)
    assert [to for to, m in out if isinstance(m, CommitBatch)] == [replacement]
    rank.set_drafters([])
    assert rank.plan_step(session.now) is not None, "nobody to wait for"


def test_the_same_drafters_again_void_nothing() -> None:
    session, commit = prefilled()
    session.rank.set_drafters([DRAFTER])
    assert session.rank.plan_step(session.now) is None
    session.rank.on_message(proposal_for(session, commit), session.now)
    plan = session.rank.plan_step(session.now)
    assert plan is not None and plan.verify_len.tolist() == [3]


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
