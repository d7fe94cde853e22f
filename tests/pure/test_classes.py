"""Weights, deadlines and lengths of classes: worth instead of survival, prices that keep deadlines, nothing wasted."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.classes import (
    HOLD_STEPS,
    MAX_BOOST,
    ClassPrices,
    plan_classes,
    solve,
)
from actors.core.group_times import GroupTimes
from actors.core.joint import plan_group
from actors.core.service_class import ServiceClass, allocate_classes
from tests.pure.lockstep import curve, group, staircase

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
GAMMA = 4


def survivals(rng: np.random.Generator, rows: int) -> Float32:
    product: Float32 = np.cumprod(rng.beta(4, 1.5, (rows, GAMMA)).astype(np.float32), axis=1)
    return product


def verified(
    shown: Float32, ids: Int64, requests: Int64, times: GroupTimes, prices: ClassPrices
) -> npt.NDArray[np.int32]:
    """The lengths the ranks of a group would choose under the plan for the same survivals."""
    plan = plan_classes(shown, ids, requests, times, prices)
    ends = np.concatenate([[0], np.cumsum(requests)])
    lens = [
        allocate_classes(
            shown[a:b], budget.max_draft_tokens, budget.min_survival, np.full(b - a, GAMMA),
            ids[a:b], prices.classes, prices.weights().tolist(),
        )
        for (a, b), budget in zip(itertools.pairwise(ends), plan.budgets(), strict=True)
    ]  # fmt: skip
    return np.concatenate(lens)


def speeds(
    shown: Float32, ids: Int64, requests: Int64, times: GroupTimes, prices: ClassPrices
) -> npt.NDArray[np.float64]:
    """Tokens a second of one request of each class."""
    lens = verified(shown, ids, requests, times, prices)
    tokens = 1.0 + (shown * (np.arange(GAMMA) < lens[:, None])).sum(axis=1)
    rank = np.repeat(np.arange(len(requests)), requests)
    drafts = np.bincount(rank, weights=lens, minlength=len(requests)).astype(int)
    per_class = [tokens[ids == c].mean() for c in range(len(prices.classes))]
    return np.array(per_class) / times.step_time_s(drafts)


def test_equal_classes_are_planned_as_without_classes() -> None:
    rng = np.random.default_rng(0)
    shown, requests = survivals(rng, 30), np.array([20, 10])
    times = group([staircase(256, 16, 1.0, 0.3)] * 2, requests)
    prices = ClassPrices([ServiceClass("a"), ServiceClass("b")])
    ids = rng.integers(0, 2, 30)
    plain = plan_group(shown, requests, times)
    planned = plan_classes(shown, ids, requests, times, prices)
    assert (planned.max_draft_tokens == plain.max_draft_tokens).all()
    assert (planned.min_survival == plain.min_survival).all()


def test_a_class_of_more_weight_gets_the_slots_that_are_contended() -> None:
    rng = np.random.default_rng(1)
    half = survivals(rng, 20)
    shown, ids = np.concatenate([half, half]), np.repeat([0, 1], 20)
    requests = np.array([40])
    times = group([curve([1, 400], [1.0, 12.0])], requests)
    equal = verified(shown, ids, requests, times, ClassPrices([ServiceClass("a")] * 2))
    prices = ClassPrices([ServiceClass("a"), ServiceClass("b", weight=3.0)])
    lens = verified(shown, ids, requests, times, prices)
    assert equal[:20].sum() == equal[20:].sum()
    assert lens[20:].sum() > 1.5 * lens[:20].sum()


def test_what_a_heavy_class_has_no_use_for_goes_to_the_light_one() -> None:
    """Work-conserving: slots that cost no time are never left empty for a class that cannot fill them."""
    rng = np.random.default_rng(2)
    shown = survivals(rng, 20)
    shown[10:] = 0.0  # the heavy class has no proposals
    ids, requests = np.repeat([0, 1], 10), np.array([20])
    times = group([staircase(200, 32, 1.0, 0.9)], requests)
    prices = ClassPrices([ServiceClass("light"), ServiceClass("heavy", weight=10.0)])
    lens = verified(shown, ids, requests, times, prices)
    assert lens[10:].sum() == 0
    assert lens[:10].sum() == 12


def test_shortest_and_longest_lengths_hold_whatever_the_slots_are_worth() -> None:
    rng = np.random.default_rng(3)
    shown, requests = survivals(rng, 12), np.array([12])
    shown[4] = 0.0
    ids = np.repeat([0, 1, 2], 4)
    prices = ClassPrices(
        [
            ServiceClass("least", min_verify_len=2),
            ServiceClass("most", max_verify_len=1),
            ServiceClass("free"),
        ]
    )
    dear = group([curve([1, 12, 100], [1.0, 1.0, 300.0])], requests)
    lens = verified(shown, ids, requests, dear, prices)
    assert lens.tolist() == [2] * 4 + [0] * 8
    cheap = group([curve([1, 100], [1.0, 1.01])], requests)
    lens = verified(shown, ids, requests, cheap, prices)
    assert lens.tolist() == [4] * 4 + [0] + [1] * 3 + [4] * 4
    plan = plan_classes(shown, ids, requests, dear, prices)
    assert plan.max_draft_tokens[0] == 8
    everything = allocate_classes(
        shown, 99, 0.0, np.full(12, GAMMA), ids, prices.classes, prices.weights().tolist()
    )
    assert everything[4:8].tolist() == [1] * 4


def test_a_row_without_a_proposal_has_nothing_to_force() -> None:
    rng = np.random.default_rng(4)
    shown, requests, ids = survivals(rng, 4), np.array([4]), np.zeros(4, np.int64)
    shown[0] = 0.0
    prices = ClassPrices([ServiceClass("least", min_verify_len=2)])
    dear = group([curve([1, 4, 100], [1.0, 1.0, 300.0])], requests)
    assert verified(shown, ids, requests, dear, prices).tolist() == [0, 2, 2, 2]
    assert plan_classes(shown, ids, requests, dear, prices).max_draft_tokens[0] == 6


def test_forced_slots_fill_the_step_before_any_other_is_weighed() -> None:
    """Eight requests and their sixteen forced slots end a tread: one token more is not worth the next."""
    rng = np.random.default_rng(5)
    shown, requests, ids = survivals(rng, 8), np.array([8]), np.zeros(8, np.int64)
    prices = ClassPrices([ServiceClass("least", min_verify_len=2)])
    stairs = group([staircase(96, 24, 1.0, 5.0)], requests)
    plan = plan_classes(shown, ids, requests, stairs, prices)
    assert plan.max_draft_tokens[0] == 16
    assert plan.step_time_s == 1.0


def contended(seed: int) -> tuple[Float32, Int64, Int64, GroupTimes]:
    """A crowd on one rank whose drafts seldom survive, a few good ones on the other."""
    rng = np.random.default_rng(seed)
    crowd = np.cumprod(rng.beta(3, 2, (40, GAMMA)).astype(np.float32), axis=1)
    shown = np.concatenate([crowd, survivals(rng, 8)])
    requests, ids = np.array([40, 8]), np.repeat([0, 1], [40, 8])
    return shown, ids, requests, group([curve([1, 300], [0.02, 0.12])] * 2, requests)


def test_a_deadline_is_kept_by_raising_the_price_of_the_others() -> None:
    problem = contended(0)
    free = speeds(*problem, ClassPrices([ServiceClass("crowd"), ServiceClass("few", weight=8.0)]))
    wanted = 1.1 * free[0]
    prices = ClassPrices(
        [ServiceClass("crowd", max_tpot_s=1 / wanted), ServiceClass("few", weight=8.0)]
    )
    solve([problem], prices)
    kept = speeds(*problem, prices)
    assert free[0] < wanted
    assert kept[0] == pytest.approx(wanted, rel=0.03)
    assert kept[1] < free[1]
    assert prices.unmet == ()


@pytest.mark.parametrize("seed", range(6))
def test_with_a_deadline_the_price_finds_the_best_plan_there_is(seed: int) -> None:
    """Against every pair of lengths sums: one rank, two classes, ranked inside each class."""
    rng = np.random.default_rng(seed)
    shown = np.concatenate([survivals(rng, 10), survivals(rng, 10) * np.float32(0.6)])
    ids, requests = np.repeat([0, 1], 10), np.array([20])
    times = group([curve([1, 120], [1.0, 4.0])], requests)
    sums = [
        np.concatenate([[0.0], np.cumsum(np.sort(shown[ids == c].ravel())[::-1])]) for c in (0, 1)
    ]
    rates = {
        (a, b): ((10 + sums[0][a]), (10 + sums[1][b]), times.step_time_s([a + b]))
        for a, b in itertools.product(range(41), repeat=2)
    }
    fastest = max(second / (10 * seconds) for _, second, seconds in rates.values())
    free = speeds(shown, ids, requests, times, ClassPrices([ServiceClass("a"), ServiceClass("b")]))
    wanted = 0.5 * (free[1] + fastest)  # between what it gets and what it could get
    best = max(
        (first + second) / seconds
        for first, second, seconds in rates.values()
        if second / (10 * seconds) >= wanted
    )
    prices = ClassPrices([ServiceClass("a"), ServiceClass("b", max_tpot_s=1 / wanted)])
    solve([(shown, ids, requests, times)], prices, iterations=80)
    kept = speeds(shown, ids, requests, times, prices)
    assert kept[1] >= 0.98 * wanted
    assert 10 * kept.sum() >= 0.97 * best


def test_a_deadline_that_cannot_be_met_is_named() -> None:
    problem = contended(1)
    prices = ClassPrices([ServiceClass("crowd", max_tpot_s=1e-4), ServiceClass("few")])
    solve([problem], prices, iterations=60)
    assert prices.unmet == ("crowd",)
    assert prices.weights().min() == pytest.approx(1 / MAX_BOOST)


def serve(prices: ClassPrices, elasticity: float, num_steps: int) -> list[float]:
    """Weight of the second class over steps in which the first answers its multiplier so strongly."""
    weights = []
    for _ in range(num_steps):
        relative = prices.weights()
        speed = 2.0 * (relative[0] / relative[1]) ** elasticity
        prices.observe(np.array([10, 10]), np.array([10 * speed, 40.0]), 1.0)
        weights.append(float(prices.weights()[1]))
    return weights


def test_a_multiplier_that_does_not_help_is_taken_back_and_the_deadline_named() -> None:
    classes = [ServiceClass("late", max_tpot_s=0.1), ServiceClass("others")]
    futile = ClassPrices(classes)
    weights = serve(futile, 0.0, 400)
    assert 0.1 < min(weights) < 0.2  # the trial
    assert weights[60:] == [1.0] * (len(weights) - 60)
    assert futile.unmet == ("late",)
    helped = ClassPrices(classes)
    weights = serve(helped, 0.8, 400)
    assert helped.speed[0] == pytest.approx(10.0, rel=0.02)
    assert helped.unmet == ()


def test_a_multiplier_that_did_not_help_is_tried_again_later() -> None:
    prices = ClassPrices([ServiceClass("late", max_tpot_s=0.1), ServiceClass("others")])
    serve(prices, 0.0, 100)
    serve(prices, 0.8, HOLD_STEPS + 200)
    assert prices.speed[0] == pytest.approx(10.0, rel=0.02)


def test_a_deadline_with_slack_costs_nothing_and_its_price_falls_back() -> None:
    prices = ClassPrices([ServiceClass("a", max_tpot_s=0.1), ServiceClass("b")])
    serve(prices, 0.8, 200)
    assert prices.weights()[1] < 0.2
    for _ in range(400):
        prices.observe(np.array([10, 10]), np.array([40.0, 40.0]), 0.1)  # 40 tokens/s
    assert prices.weights().tolist() == [1.0, 1.0]


def test_fairness_weighs_a_request_at_half_the_speed_twice() -> None:
    prices = ClassPrices([ServiceClass("slow"), ServiceClass("fast")], fairness=1.0)
    assert prices.weights().tolist() == [1.0, 1.0]
    prices.observe(np.array([5, 5]), np.array([5.0, 10.0]), 1.0)
    assert prices.weights().tolist() == pytest.approx([1.0, 0.5])


def test_fairness_brings_the_classes_closer() -> None:
    problem = contended(2)
    throughput = ClassPrices([ServiceClass("crowd"), ServiceClass("few")])
    fair = ClassPrices([ServiceClass("crowd"), ServiceClass("few")], fairness=1.0)
    for prices in (throughput, fair):
        solve([problem], prices)
    assert np.ptp(speeds(*problem, fair)) < np.ptp(speeds(*problem, throughput))


def test_a_class_nobody_is_in_has_no_speed_and_no_say() -> None:
    problem = contended(3)
    classes = [ServiceClass("crowd"), ServiceClass("few"), ServiceClass("absent", max_tpot_s=0.1)]
    prices = ClassPrices(classes)
    solve([problem], prices)
    assert np.isnan(prices.speed[2])
    prices.observe(np.array([1, 0, 0]), np.array([2.0, 0.0, 0.0]), 1.0)
    assert np.isnan(prices.speed[2])
    assert prices.unmet == ()


def test_groups_share_one_price_a_class() -> None:
    """A class that is late on average is raised in both groups, not only where it is slow."""
    slow, fast = contended(4), contended(5)
    quick = (*fast[:3], group([curve([1, 300], [0.01, 0.05])] * 2, fast[2]))
    free = ClassPrices([ServiceClass("crowd"), ServiceClass("few", weight=8.0)])
    mean = np.mean([speeds(*g, free)[0] for g in (slow, quick)])
    late = ClassPrices(
        [ServiceClass("crowd", max_tpot_s=1 / (1.05 * mean)), ServiceClass("few", weight=8.0)]
    )
    solve([slow, quick], late)
    after = [speeds(*g, late)[0] for g in (slow, quick)]
    assert np.mean(after) == pytest.approx(1.05 * mean, rel=0.03)
    assert abs(after[0] - after[1]) > 0.2 * mean


def test_solving_stops_after_its_iterations() -> None:
    problem = contended(1)
    prices = ClassPrices([ServiceClass("crowd", max_tpot_s=1e-4), ServiceClass("few")])
    (plan,) = solve([problem], prices, iterations=1)
    assert plan.step_time_s > 0
    assert prices.unmet == ()
