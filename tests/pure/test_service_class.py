"""Classes of service on a rank: who goes first inside a budget, what is forced, and what a decision says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.local_policy import LocalPolicy
from actors.core.messages import VerifyBudget
from actors.core.prefix_scheduler import allocate
from actors.core.service_class import ClassAllocation, ServiceClass, classes_of
from actors.core.step_decision import StepDecision, VerifyChoice
from actors.core.verify_decision import StepFacts, VerifyDecider
from configs.policy import PolicyConfig, ServiceClassConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import RANK

GAMMA = 3
LIGHT, HEAVY = ServiceClass("light", weight=0.5), ServiceClass("heavy", weight=2.0)
ROWS = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]], np.float32)
IDS = np.array([0, 1], np.int32)


class Fixed:
    """A policy that always answers the same."""

    def __init__(self, choice: VerifyChoice) -> None:
        self.choice = choice

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return self.choice


def decide(
    choice: VerifyChoice, *classes: ServiceClass, survivals: np.ndarray = ROWS, room: int = 99
) -> StepDecision:
    decider = VerifyDecider(
        RANK.name, RANK.epoch, Fixed(choice), allocate, classes=ClassAllocation(classes)
    )
    has_draft = survivals.any(axis=1)
    caps = np.where(has_draft, GAMMA, 0).astype(np.int32)
    return decider.decide(0, ("a", "b"), survivals, caps, has_draft, room, 0, 0, class_ids=IDS)


def test_a_budget_with_weights_is_spent_by_worth_and_its_price_is_a_worth() -> None:
    weighed = VerifyChoice(3, 0.2, "joint", class_weights=(0.25, 1.0))
    decision = decide(weighed, LIGHT, HEAVY)
    assert decision.verify_len.tolist() == [0, 3]
    assert decision.cut_by(0) == "budget"
    dear = decide(replace(weighed, max_draft_tokens=6, min_survival=0.21), LIGHT, HEAVY)
    assert dear.verify_len.tolist() == [1, 3]
    assert dear.cut_by(0) == "price"  # a survival of 0.8 is worth 0.2


def test_a_budget_without_weights_has_a_survival_for_its_price_and_leaves_nothing_unused() -> None:
    alone = VerifyChoice(5, 0.45, "local_lagged")
    tiny = replace(LIGHT, weight=1e-9)
    decision = decide(alone, tiny, HEAVY)
    assert decision.verify_len.tolist() == [3, 2]  # all that reaches the price
    assert decision.cut_by(1) == "price"
    short = decide(replace(alone, max_draft_tokens=3), tiny, HEAVY)
    assert short.verify_len.tolist() == [1, 2]  # too few for all: the heavier class goes first


@pytest.mark.parametrize("most", [0, 1, 6])
def test_the_shortest_length_is_verified_even_where_a_rank_alone_would_verify_nothing(
    most: int,
) -> None:
    owed = ServiceClass("owed", min_verify_len=2)
    decision = decide(VerifyChoice(most, 0.95, "local_low_gain"), LIGHT, owed)
    assert decision.verify_len.tolist() == [0, 2]
    assert decision.most_draft_tokens == max(most, 2)
    silent = decide(
        VerifyChoice(most, 0.95, "local_low_gain"), LIGHT, owed, survivals=ROWS * [[1], [0]]
    )
    assert silent.verify_len.tolist() == [0, 0]


def test_a_plan_that_knows_the_classes_has_counted_what_is_forced() -> None:
    owed = ServiceClass("owed", min_verify_len=2)
    decision = decide(VerifyChoice(1, 0.0, "joint", class_weights=(1.0, 1.0)), LIGHT, owed)
    assert decision.verify_len.tolist() == [0, 1]


def test_no_request_is_verified_past_the_longest_length_of_its_class() -> None:
    short = ServiceClass("short", max_verify_len=1)
    for choice in (VerifyChoice(6, 0.0, "x"), VerifyChoice(6, 0.0, "x", class_weights=(1.0, 1.0))):
        decision = decide(choice, short, HEAVY)
        assert decision.verify_len.tolist() == [1, 3]
        assert decision.cut_by(0) == "policy_length"


def test_the_room_of_the_step_bounds_what_is_forced() -> None:
    owed = ServiceClass("owed", min_verify_len=3)
    assert decide(VerifyChoice(0, 1.0, "x"), owed, owed, room=2).verify_len.sum() == 2


def test_rows_whose_class_nobody_names_are_of_the_first() -> None:
    classes = ClassAllocation([ServiceClass("first", max_verify_len=1), HEAVY])
    choice = Fixed(VerifyChoice(9, 0.0, "x"))
    decider = VerifyDecider(RANK.name, RANK.epoch, choice, allocate, classes=classes)
    caps, has = np.full(2, GAMMA, np.int32), np.ones(2, np.bool_)
    assert decider.decide(0, ("a", "b"), ROWS, caps, has, 9, 0, 0).verify_len.tolist() == [1, 1]


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), with_budget=st.booleans(), room=st.integers(0, 12))
def test_no_slot_is_judged_by_draft_tokens_from_itself_on(
    seed: int, with_budget: bool, room: int
) -> None:
    """C3 with classes: whether (r, k) is verified stays the same whatever a_{r,>k} is."""
    rng = np.random.default_rng(seed)
    count = 4
    classes = [LIGHT, HEAVY, ServiceClass("owed", min_verify_len=1, max_verify_len=2)]
    ids = rng.integers(0, 3, count).astype(np.int32)
    now = np.cumprod(rng.uniform(0.05, 1, (count, GAMMA)), axis=1).astype(np.float32)
    row, position = int(rng.integers(count)), int(rng.integers(1, GAMMA + 1))
    other = now.copy()
    other[row, position:] = now[row, position - 1] * rng.uniform(0, 1, GAMMA - position)
    other[row] = np.minimum.accumulate(other[row])

    def verified(survivals: np.ndarray) -> bool:
        policy = LocalPolicy("static_threshold", static_threshold=0.3)
        decider = VerifyDecider(
            RANK.name, RANK.epoch, policy, allocate, classes=ClassAllocation(classes)
        )
        if with_budget:
            weights = (0.25, 1.0, 0.5)
            decider.budgets.offer(
                VerifyBudget(RANK.name, RANK.epoch, 0, 2, 9, 6, 0.1, "joint", weights), 2
            )
        caps, has = np.full(count, GAMMA, np.int32), np.ones(count, np.bool_)
        decision = decider.decide(2, tuple("abcd"), survivals, caps, has, room, 0, 0, class_ids=ids)
        return int(decision.verify_len[row]) >= position

    assert verified(now) == verified(other)


def test_a_report_names_the_class_and_the_tokens_of_every_round() -> None:
    session = Session(make_rank(), error=0.3)
    for name, class_id in (("a", 1), ("b", 0), ("c", 2)):
        session.submit(replace(admitted(name, [1, 2, 3], 30), class_id=class_id))
    told: set[tuple[int, ...]] = set()
    while session.step() is not None:
        report = session.rank.report
        assert report is not None and report.class_ids is not None
        assert report.row_committed is not None
        assert len(report.class_ids) == len(report.row_committed) == len(report.survivals)
        if not report.num_prefill_tokens:
            assert int(report.row_committed.sum()) == report.num_committed
        told.add(tuple(report.class_ids.tolist()))
    assert (1, 0, 2) in told


def test_the_configured_classes_keep_their_order_and_say_seconds() -> None:
    policy = PolicyConfig(
        name="joint",
        classes=(
            ServiceClassConfig(name="a", weight=2.0, max_tpot_ms=40.0, max_verify_len=3),
            ServiceClassConfig(name="b", min_verify_len=1),
        ),
    )
    assert classes_of(policy) == (
        ServiceClass("a", 2.0, 0.04, 0, 3),
        ServiceClass("b", min_verify_len=1),
    )
