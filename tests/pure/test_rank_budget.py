"""Which budget a step uses, what it cuts, and what a rank may look at when it decides alone (C3)."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.local_policy import LocalPolicy, PolicyName
from actors.core.messages import AnticipatingBudgetError, RankProfile, VerifyBudget
from actors.core.prefix_scheduler import allocate
from actors.core.sps import CostCurve
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import BudgetShelf, StepFacts, VerifyDecider
from tests.pure.rank_harness import Session, VerifyAll, admitted, make_rank
from tests.pure.scripted_drafter import RANK, oracle

PROMPT = [3, 1, 4, 1, 5]


def budget(
    based_on: int, for_step: int, tokens: int = 2, expires: int = 100, **more: object
) -> VerifyBudget:
    values = {
        "rank": RANK.name,
        "epoch": RANK.epoch,
        "based_on_step": based_on,
        "for_step": for_step,
        "expires_step": expires,
        "max_draft_tokens": tokens,
        "min_survival": 0.0,
        "rule": "lagged",
    }
    return VerifyBudget(**{**values, **more})  # type: ignore[arg-type]


def test_the_newest_lawful_budget_wins_and_expires() -> None:
    shelf = BudgetShelf(RANK.name, RANK.epoch)
    for b in (budget(1, 3, 11), budget(4, 6, 44), budget(2, 4, 22), budget(5, 9, 55, expires=10)):
        shelf.offer(b, step=3)
    chosen = {step: b.max_draft_tokens for step in range(12) if (b := shelf.newest(step))}
    assert chosen == {3: 11, 4: 22, 5: 22, 6: 44, 7: 44, 8: 44, 9: 55, 10: 55, 11: 44}


@pytest.mark.parametrize(
    "wrong",
    [
        budget(1, 3, rank="target-1"),
        budget(1, 3, epoch="0"),
        budget(1, 3, expires=4),
    ],
)
def test_a_budget_for_another_rank_incarnation_or_time_is_refused(wrong: VerifyBudget) -> None:
    shelf = BudgetShelf(RANK.name, RANK.epoch)
    shelf.offer(wrong, step=5)
    assert (shelf.newest(5), shelf.newest(3), shelf.num_refused) == (None, None, 1)


def test_a_budget_too_fresh_is_refused_even_when_its_own_check_was_bypassed() -> None:
    with pytest.raises(AnticipatingBudgetError):
        budget(2, 3)
    forged = copy.copy(budget(1, 3))
    object.__setattr__(forged, "based_on_step", 2)
    forged = pickle.loads(pickle.dumps(forged))
    session = Session(make_rank())
    session.rank.on_message(forged, 0.0)
    assert session.rank.decider.budgets.num_refused == 1
    assert session.rank.decider.budgets.newest(3) is None


def test_a_budget_limits_the_step_and_is_reported() -> None:
    session = Session(make_rank(gamma=3), error=0.0)
    for name in "abc":
        session.submit(admitted(name, PROMPT, 40))
    session.step()
    session.rank.on_message(budget(-5, 0, tokens=4), session.now)
    plan = session.step()
    assert plan is not None and plan.verify_len.sum() == 4
    report = session.rank.report
    assert report is not None and (report.budget_rule, report.budget_used) == ("lagged", 4)
    session.rank.on_message(budget(-1, 1, tokens=0), session.now)
    plan = session.step()
    assert plan is not None and plan.verify_len.sum() == 0
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 40)[0]


class Recorder:
    def __init__(self) -> None:
        self.facts: list[StepFacts] = []

    def choose(self, facts: StepFacts) -> VerifyChoice:
        self.facts.append(facts)
        return VerifyChoice(facts.survivals.size, 0.0, "all")


def test_a_rank_that_decides_alone_looks_two_steps_back() -> None:
    recorder = Recorder()
    session = Session(make_rank(recorder), error=0.3)
    for name in "ab":
        session.submit(admitted(name, PROMPT, 30))
    session.run()
    survivals = {facts.step: facts.survivals for facts in recorder.facts}
    assert len(recorder.facts) > 6
    first, second, *others = recorder.facts
    assert (first.lagged_step, second.lagged_step) == (-1, -1)
    for facts in others:
        assert facts.lagged_step == facts.step - 2
        assert np.array_equal(facts.lagged_survivals, survivals[facts.step - 2])


def test_steps_without_rounds_do_not_hide_the_last_survivals() -> None:
    decider = VerifyDecider(RANK.name, RANK.epoch, recorder := Recorder(), allocate)
    rows = np.full((1, 3), 0.5, np.float32)

    def decide(step: int, survivals: np.ndarray) -> None:
        count = len(survivals)
        caps, has = np.full(count, 3, np.int32), np.ones(count, np.bool_)
        decider.decide(step, ("a",) * count, survivals, caps, has, 9, 0, 0)

    decide(0, rows)
    for step in range(1, 6):
        decide(step, rows[:0])
    decide(6, rows)
    assert recorder.facts[-1].lagged_step == 0


@pytest.mark.parametrize("has_prefill", [False, True])
def test_drafts_never_push_a_step_over_its_tokens(has_prefill: bool) -> None:
    session = Session(make_rank(max_batch_tokens=12, gamma=3, max_running=8), error=0.0)
    for i in range(7):
        session.submit(admitted(f"r{i}", [i], 40))
    for _ in range(3):
        session.step()
    if has_prefill:
        session.submit(admitted("long", list(range(40)), 3))
    for _ in range(5):
        plan = session.step()
        assert plan is not None and plan.batch_tokens <= 12  # the target asserts it too
        rounds = sum(name.startswith("r") for name in plan.request_ids)
        assert rounds == 7
        num_prefill = plan.batch_tokens - 7 - int(plan.verify_len.sum())
        assert num_prefill >= 3 if has_prefill and session.rank.book.prefilling else True
    session.run()


def test_the_reason_of_every_cut_can_be_told() -> None:
    survivals = np.array(
        [[0.9, 0.8, 0.7], [0.9, 0.4, 0.3], [0.6, 0.55, 0.5], [0, 0, 0], [0.95, 0.9, 0.1]],
        np.float32,
    )
    caps = np.array([3, 3, 3, 0, 2], np.int32)
    has_draft = np.array([1, 1, 1, 0, 1], np.bool_)
    names = tuple("abcde")

    class Priced:
        def choose(self, facts: StepFacts) -> VerifyChoice:
            return VerifyChoice(7, 0.5, "priced")

    decider = VerifyDecider(RANK.name, RANK.epoch, Priced(), allocate)
    decision = decider.decide(0, names, survivals, caps, has_draft, 99, 0, 0)
    assert decision.verify_len.tolist() == [3, 1, 1, 0, 2]
    assert [decision.cut_by(row) for row in range(5)] == [
        "none",
        "price",
        "budget",
        "fallback",
        "length",
    ]
    tight = decider.decide(1, names, survivals, caps, has_draft, 5, 0, 0)
    assert (tight.verify_len.tolist(), tight.cut_by(2)) == ([2, 1, 0, 0, 2], "room")

    class Short(VerifyAll):
        def choose(self, facts: StepFacts) -> VerifyChoice:
            return VerifyChoice(99, 0.0, "static_length", 1)

    decider = VerifyDecider(RANK.name, RANK.epoch, Short(), allocate)
    short = decider.decide(0, names, survivals, caps, has_draft, 99, 0, 0)
    assert short.verify_len.tolist() == [1, 1, 1, 0, 1]
    assert short.cut_by(0) == "policy_length"


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(["none", "static_length", "static_threshold", "algorithm1", "lagged"]),
    seed=st.integers(0, 2**32),
    room=st.integers(0, 14),
    with_budget=st.booleans(),
)
def test_no_slot_is_judged_by_draft_tokens_from_itself_on(
    name: PolicyName, seed: int, room: int, with_budget: bool
) -> None:
    """C3: whether (r, k) is verified stays the same whatever x_{r,>=k} is, that is, whatever a_{r,>k} is."""
    rng = np.random.default_rng(seed)
    count, gamma = 3, 4
    curve = CostCurve.of(
        RankProfile(
            RANK,
            "",
            np.array([1, 4, 8, 16], np.int32),
            np.array([1, 4, 8, 16], np.int32),
            np.sort(rng.uniform(1, 3, 4)),
            np.zeros(4),
            gamma,
        )
    )
    old = np.cumprod(rng.uniform(0, 1, (count, gamma)), axis=1).astype(np.float32)
    now = np.cumprod(rng.uniform(0, 1, (count, gamma)), axis=1).astype(np.float32)
    row, position = int(rng.integers(count)), int(rng.integers(1, gamma + 1))
    other = now.copy()
    later = np.cumprod(rng.uniform(0, 1, gamma - position))
    other[row, position:] = now[row, position - 1] * later

    def verified(survivals: np.ndarray) -> bool:
        policy = LocalPolicy(name, static_length=3, static_threshold=0.3)
        policy.times.measured(curve)
        decider = VerifyDecider(RANK.name, RANK.epoch, policy, allocate)
        if with_budget:
            decider.budgets.offer(budget(0, 2, tokens=5, min_survival=0.2), 2)
        caps, has = np.full(count, gamma, np.int32), np.ones(count, np.bool_)
        for step, current in enumerate((old, old, survivals), start=2):
            decision = decider.decide(step, tuple("abc"), current, caps, has, room, 0, 0)
        return int(decision.verify_len[row]) >= position

    assert verified(now) == verified(other)
