"""Which prefixes are verified: order, budget, price, early stop, lag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.messages import AnticipatingBudgetError, Endpoint, RankProfile, VerifyBudget
from actors.core.prefix_scheduler import (
    COLD_PRICE,
    UNLIMITED,
    Algorithm1,
    Budget,
    Lagged,
    allocate,
    early_stop,
    lagged_budget,
    search,
)
from actors.core.sps import CostCurve, RankTimes
from actors.core.survival import survivals
from actors.core.verify_decision import StepFacts

CONFIDENCE = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.8, 1.0])  # many ties
BLOCKS = st.integers(1, 5).flatmap(
    lambda gamma: st.lists(
        st.lists(CONFIDENCE, min_size=gamma, max_size=gamma), min_size=1, max_size=6
    )
)


def curve(tokens: list[int], step_time_s: list[float]) -> CostCurve:
    points = np.array(tokens, np.int32)
    rank = Endpoint("rank", "target", "", "", "1")
    times = np.array(step_time_s)
    return CostCurve.of(
        RankProfile(rank, "here", points, np.ones_like(points), times, 0 * times, 4)
    )


LINEAR = curve([1, 101], [1.0, 11.0])
STAIRS = curve([1, 8, 9, 16, 17, 24, 25, 32], [1.0, 1.0, 2.0, 2.0, 2.2, 2.2, 4.0, 4.0])


def known(of: CostCurve) -> RankTimes:
    times = RankTimes()
    times.measured(of)
    return times


def facts(
    survival: np.ndarray, lagged_step: int = 7, lagged: np.ndarray | None = None
) -> StepFacts:
    caps = np.full(len(survival), survival.shape[1], np.int32)
    stale = survival[:0] if lagged is None else lagged
    return StepFacts(9, survival, caps, lagged_step, stale, 0, 0)


def one_by_one(
    survival: np.ndarray, budget: int, price: float, caps: np.ndarray, arrival: np.ndarray
) -> list[int]:
    """The definition of `allocate`: take the best next slot again and again."""
    lens = [0] * len(survival)
    for _ in range(budget):
        open_slots = [
            (-survival[row, lens[row]], lens[row], arrival[row], row)
            for row in range(len(survival))
            if lens[row] < min(caps[row], survival.shape[1]) and survival[row, lens[row]] >= price
        ]
        if not open_slots:
            break
        lens[min(open_slots)[-1]] += 1
    return lens


@given(BLOCKS, st.integers(0, 20), st.sampled_from([0.0, 0.2, 0.5]), st.randoms())
def test_allocation_takes_the_best_next_slot_again_and_again(blocks, budget, price, random) -> None:  # type: ignore[no-untyped-def]
    survival = survivals(np.array(blocks, np.float32))
    rows, gamma = survival.shape
    caps = np.array([random.randint(0, gamma) for _ in range(rows)])
    arrival = np.array(random.sample(range(rows), rows))
    ours = allocate(survival, budget, price, caps, arrival)
    assert ours.tolist() == one_by_one(survival, budget, price, caps, arrival)
    assert ours.sum() <= budget and (ours <= caps).all()


@given(BLOCKS, st.integers(0, 20), st.randoms())
def test_a_slot_is_judged_by_nothing_after_it_in_its_own_row(blocks, budget, random) -> None:  # type: ignore[no-untyped-def]
    """Change what comes after slot k of a row: whether slot k is verified must not change (C3)."""
    survival = survivals(np.array(blocks, np.float32))
    rows, gamma = survival.shape
    row, k = random.randrange(rows), random.randrange(gamma)
    other = survival.copy()
    other[row, k + 1 :] = survival[row, k] * random.choice([0.0, 0.3, 1.0])
    caps = np.full(rows, gamma)
    for decide in (
        lambda a: allocate(a, budget, 0.2, caps),
        lambda a: early_stop(a, caps, LINEAR),
        lambda a: early_stop(a, caps, STAIRS),
    ):
        assert (decide(survival)[row] > k) == (decide(other)[row] > k)


def test_ties_go_to_the_earlier_position_then_to_the_earlier_arrival() -> None:
    tied = np.full((3, 2), 0.5, np.float32)
    caps = np.full(3, 2)
    assert allocate(tied, 2, 0.0, caps).tolist() == [1, 1, 0]
    assert allocate(tied, 4, 0.0, caps).tolist() == [2, 1, 1]
    assert allocate(tied, 2, 0.0, caps, arrival=np.array([2, 0, 1])).tolist() == [0, 1, 1]


def test_survivals_that_increase_along_a_row_are_refused() -> None:
    with pytest.raises(AssertionError, match="increase along a row"):
        allocate(np.array([[0.5, 0.6]], np.float32), 2, 0.0, np.array([2]))


def test_a_negative_budget_verifies_nothing() -> None:
    assert allocate(np.ones((2, 2), np.float32), -3, 0.0, np.full(2, 2)).tolist() == [0, 0]


# --- search ----------------------------------------------------------------------------------------------------------


@given(BLOCKS, st.sampled_from([LINEAR, STAIRS]))
def test_search_finds_the_best_throughput_of_all_budgets(blocks, times) -> None:  # type: ignore[no-untyped-def]
    survival = survivals(np.array(blocks, np.float32))
    rows = len(survival)
    ranked = np.sort(survival.ravel().astype(np.float64))[::-1]

    def throughput(budget: int) -> float:
        return (rows + ranked[:budget].sum()) / float(times.step_time_s_at(rows, rows + budget))

    found = search(survival, times)
    assert throughput(found.max_draft_tokens) == pytest.approx(
        max(map(throughput, range(len(ranked) + 1)))
    )


def test_search_crosses_a_local_cliff_that_stops_algorithm_1() -> None:
    survival = np.full((7, 4), 0.9, np.float32)
    caps = np.full(7, 4)
    assert early_stop(survival, caps, STAIRS).sum() == 1  # up to the end of the first tread
    assert search(survival, STAIRS).max_draft_tokens == 24 - 7


def test_a_found_budget_spends_what_it_found_on_the_very_survivals_it_was_found_on() -> None:
    for seed in range(50):
        survival = survivals(np.random.default_rng(seed).beta(4, 1, (6, 5)).astype(np.float32))
        found = search(survival, STAIRS)
        spent = allocate(survival, found.max_draft_tokens, found.min_survival, np.full(6, 5)).sum()
        assert spent == found.max_draft_tokens


def test_on_a_tread_the_price_is_low_and_on_a_slope_it_is_what_a_token_costs() -> None:
    survival = survivals(np.full((7, 4), 0.9, np.float32))
    assert search(survival, STAIRS).min_survival < 1e-3
    found = search(survival, LINEAR)
    if found.max_draft_tokens:
        best = found.max_draft_tokens
        rate = (7 + np.sort(survival.ravel())[::-1][:best].sum()) / float(
            LINEAR.step_time_s_at(7, 7 + best)
        )
        assert found.min_survival == pytest.approx(rate * 0.1, rel=1e-5)


def test_tokens_that_never_pay_are_not_verified() -> None:
    hopeless = np.full((4, 4), 0.01, np.float32)
    assert search(hopeless, LINEAR) == Budget(0, 1.0, "lagged")


def test_a_gain_below_the_margin_is_not_worth_a_budget() -> None:
    survival = survivals(np.full((2, 2), 0.55, np.float32))
    gentle = curve([1, 2, 3, 4, 5, 6], [1.0, 1.0, 1.1, 1.2, 1.3, 1.4])
    assert search(survival, gentle, min_predicted_gain=0.0).max_draft_tokens > 0
    assert search(survival, gentle, min_predicted_gain=0.5) == Budget(0, 1.0, "low_gain")


def test_prefill_tokens_in_the_step_move_it_along_the_curve() -> None:
    survival = np.full((4, 4), 0.9, np.float32)
    assert search(survival, STAIRS, num_other_tokens=0).max_draft_tokens == 16
    assert search(survival, STAIRS, num_other_tokens=4).max_draft_tokens == 16
    assert search(survival, STAIRS, num_other_tokens=12).max_draft_tokens == 8


def test_requests_without_a_proposal_count_as_requests_but_offer_nothing() -> None:
    survival = np.array([[0.9, 0.8], [0.0, 0.0]], np.float32)
    assert search(survival, STAIRS).max_draft_tokens == 2


def test_an_idle_rank_has_no_budget() -> None:
    assert search(np.zeros((0, 4), np.float32), STAIRS).rule == "idle"
    assert lagged_budget(np.zeros((0, 4), np.float32), known(STAIRS)).rule == "idle"


def test_a_flat_curve_never_verifies_everything() -> None:
    flat = known(curve([1, 64], [1.0, 1.0]))
    survival = survivals(np.full((3, 4), 0.6, np.float32))
    found = lagged_budget(survival, flat)
    assert found == Budget(UNLIMITED, COLD_PRICE, "flat_curve")
    assert allocate(
        survival, found.max_draft_tokens, found.min_survival, np.full(3, 4)
    ).tolist() == [1, 1, 1]
    assert Algorithm1(flat).choose(facts(survival)).rule == "flat_curve"


def test_algorithm_1_stops_at_the_first_slot_that_does_not_raise_throughput() -> None:
    """The paper's appendix A: R = 1, a_1 = .8, SPS = (1, .5, .45); the second slot would pay, the first does not."""
    times = curve([1, 2, 3], [1.0, 2.0, 1 / 0.45])
    survival = np.array([[0.8, 0.72]], np.float32)
    assert early_stop(survival, np.array([2]), times).tolist() == [0]
    assert search(survival, times).max_draft_tokens == 2


def test_algorithm_1_as_a_budget_admits_the_slots_it_chose() -> None:
    for seed in range(30):
        survival = survivals(np.random.default_rng(seed).random((5, 4)).astype(np.float32))
        caps = np.full(5, 4)
        choice = Algorithm1(known(STAIRS)).choose(facts(survival))
        admitted = allocate(survival, choice.max_draft_tokens, choice.min_survival, caps)
        assert (admitted == early_stop(survival, caps, STAIRS)).all()


# --- lag (C3) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("based_on", "for_step", "lawful"), [(7, 9, True), (7, 12, True), (8, 9, False), (9, 9, False)]
)
def test_a_budget_refuses_survivals_younger_than_two_steps(
    based_on: int, for_step: int, lawful: bool
) -> None:
    def build() -> VerifyBudget:
        return VerifyBudget("rank", "1", based_on, for_step, for_step + 8, 4, 0.2)

    if lawful:
        assert build().for_step == for_step
    else:
        with pytest.raises(
            AnticipatingBudgetError, match=f"based_on_step={based_on} for_step={for_step}"
        ):
            build()


@pytest.mark.parametrize("lagged_step", [8, 9, 10])
def test_the_local_policy_refuses_survivals_younger_than_two_steps(lagged_step: int) -> None:
    survival = np.full((1, 2), 0.9, np.float32)
    with pytest.raises(AnticipatingBudgetError, match=f"lagged_step={lagged_step} used in step 9"):
        Lagged(known(STAIRS)).choose(facts(survival, lagged_step, survival))


def test_the_lagged_policy_ignores_current_survivals() -> None:
    policy, stale = Lagged(known(LINEAR)), survivals(np.full((4, 3), 0.95, np.float32))
    choices = [
        policy.choose(facts(np.full((4, 3), current, np.float32), 7, stale))
        for current in (0.0, 0.5, 1.0)
    ]
    assert choices[0] == choices[1] == choices[2]
    assert choices[0].rule == "local_lagged"


def test_without_older_survivals_the_policy_is_cold() -> None:
    choice = Lagged(known(STAIRS)).choose(facts(np.ones((2, 2), np.float32), lagged_step=-1))
    assert (choice.rule, choice.min_survival) == ("cold", COLD_PRICE)
