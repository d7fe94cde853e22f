"""Proposals: matched, or dropped and counted; drafters that die, restart and share the work."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from actors.core.layout import StepPlan, StepResult
from actors.core.messages import CommitBatch
from tests.pure.rank_harness import (
    ScriptedTarget,
    Session,
    admitted,
    make_rank,
    prefilled,
    proposal_for,
    two_requests_two_drafters,
)
from tests.pure.scripted_drafter import DRAFTER, endpoint, oracle

PROMPT = [3, 1, 4, 1, 5]
ROWS = (
    *("generations", "committed_lens", "draft_token_ids", "confidences"),
    *("q_ids", "q_probs", "draft_lens"),
)


def test_a_block_in_time_is_verified() -> None:
    session, commit = prefilled()
    session.rank.on_message(proposal_for(session, commit), session.now + 0.1)
    plan = session.rank.plan_step(session.now + 0.1)
    assert plan is not None and plan.verify_len.tolist() == [3]
    assert plan.draft is not None
    assert plan.draft.q_ids[0, :, 0].tolist() == plan.token_ids[1:].tolist()


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
        **{name: np.concatenate((getattr(good, name), getattr(good, name))) for name in ROWS},
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


def test_a_block_its_drafter_passed_over_is_not_waited_for_but_still_taken() -> None:
    session = Session(make_rank(), error=0.0)
    for name in "ab":
        session.submit(admitted(name, PROMPT, 30))
    session.step(drafts=False)
    (commit,) = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    both = proposal_for(session, commit)
    first, second = (
        replace(both, request_ids=(name,), **{f: getattr(both, f)[i : i + 1] for f in ROWS})
        for i, name in enumerate("ab")
    )
    session.rank.on_message(first, session.now)
    ahead = copy.deepcopy(session.rank)
    plan = ahead.plan_step(session.now)
    assert plan is not None and plan.verify_len.tolist() == [3, 0]
    session.rank.on_message(second, session.now)
    plan = session.rank.plan_step(session.now)
    assert plan is not None and plan.verify_len.tolist() == [3, 3]


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
    assert commit.first_positions.tolist() == [0], "the new one is told the whole context"
    assert commit.features[:, 0].tolist() == list(range(commit.committed_lens[0] - 1))

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


class WithoutTaps(ScriptedTarget):
    """A target that taps no layer, as beside a drafter that only reads tokens."""

    def step(self, plan: StepPlan) -> StepResult:
        return replace(super().step(plan), features=None)


class Listener:
    """Takes commits, keeps the tokens of one request, never drafts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.widths: set[int] = set()

    def advance(self, batch: CommitBatch) -> None:
        assert len(batch.features) == len(batch.token_ids) == batch.cu_feature_len[-1]
        self.widths.add(batch.features.shape[1])
        self.tokens += batch.token_ids.tolist()

    def close(self, request_ids: tuple[str, ...]) -> None: ...


def test_a_drafter_that_only_reads_tokens_is_fed_without_features() -> None:
    rank = make_rank(max_wait_s=0.0)
    listener = Listener()
    session = Session(rank, target=WithoutTaps(rank), drafter=listener)
    session.submit(admitted("a", [1, 2, 3], 5))
    session.run()
    text, _ = oracle([1, 2, 3], 5)
    assert session.streams["a"].tokens == text
    assert listener.widths == {0}
    # The last tokens need no draft any more, so the drafter never hears of them.
    assert listener.tokens == [1, 2, 3, *text][: len(listener.tokens)]
    assert len(listener.tokens) > 3
