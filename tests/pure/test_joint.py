"""Joint budgets: the best plan of a lockstep group, by comparison with trying every plan there is."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from actors.core import joint
from actors.core.group_times import GroupTimes, SharedTime
from actors.core.joint import plan_group
from actors.core.prefix_scheduler import MIN_SURVIVAL, allocate, search
from actors.core.slot_ranking import BinnedSlots, ExactSlots
from tests.pure.lockstep import curve, group, random_curve, staircase

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def survivals_of(rng: np.random.Generator, rows: int, gamma: int = 7) -> Float32:
    product: Float32 = np.cumprod(rng.beta(4, 1.5, (rows, gamma)).astype(np.float32), axis=1)
    return product


def ranked(survivals: Float32, requests: Int64) -> list[npt.NDArray[np.float64]]:
    ends = np.concatenate([[0], np.cumsum(requests)])
    rows = [survivals[a:b].ravel() for a, b in itertools.pairwise(ends)]
    return [np.sort(row)[::-1].astype(np.float64) for row in rows]


def rate(survivals: Float32, requests: Int64, times: GroupTimes, drafts: npt.ArrayLike) -> float:
    slots = ranked(survivals, requests)
    chosen = np.asarray(drafts)
    gained = sum(float(s[:k].sum()) for s, k in zip(slots, chosen, strict=True))
    return (int(requests.sum()) + gained) / times.step_time_s(chosen)


def random_instance(rng: np.random.Generator) -> tuple[Float32, Int64, GroupTimes]:
    """Up to three ranks of up to two requests, ties everywhere, jagged f and g, prefill, unequal ranks."""
    n = int(rng.integers(1, 4))
    requests = rng.integers(0, 3, n)
    requests[0] = max(requests[0], 1)
    confidences = rng.choice([1.0, 0.9, 0.7, 0.5, 0.2, 0.0], (int(requests.sum()), 3))
    survivals = np.cumprod(confidences.astype(np.float32), axis=1)
    curves = [random_curve(rng, 16) for _ in range(n)]
    if rng.random() < 0.5:
        curves = [curves[0]] * n
    knots = np.sort(rng.choice(np.arange(1, 24), 4, replace=False)).astype(np.float64)
    shared = SharedTime(knots, np.cumsum(rng.choice([0, 0, 0.3, 1.0], 4)))
    times = GroupTimes(
        tuple(curves),
        rng.uniform(0.5, 2, n),
        rng.uniform(0, 0.3, n),
        (requests + rng.integers(0, 3, n)).astype(np.int64),
        shared if rng.random() < 0.7 else SharedTime.none(),
    )
    return survivals, requests.astype(np.int64), times


@pytest.mark.parametrize("block", range(10))
def test_the_plan_is_as_good_as_the_best_of_all_plans_on_a_thousand_instances(block: int) -> None:
    rng = np.random.default_rng(block)
    for _ in range(100):
        survivals, requests, times = random_instance(rng)
        plan = plan_group(survivals, requests, times)
        choices = [range(len(slots) + 1) for slots in ranked(survivals, requests)]
        best = max(
            rate(survivals, requests, times, drafts) for drafts in itertools.product(*choices)
        )
        achieved = rate(survivals, requests, times, plan.max_draft_tokens)
        assert achieved == pytest.approx(best, rel=1.1e-6)
        assert plan.throughput == pytest.approx(achieved, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_many_slots_are_planned_as_well_in_bins_as_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    requests = rng.integers(1, 40, 6)
    survivals = survivals_of(rng, int(requests.sum()))
    shared = SharedTime(np.array([1.0, 4000.0]), np.array([0.0, rng.choice([0.0, 2.0, 20.0])]))
    times = group([staircase(400, 24, 2.0, 0.2)] * 6, requests, shared)
    binned = plan_group(survivals, requests, times)
    monkeypatch.setattr(joint, "EXACT_SLOTS", survivals.size)
    exact = plan_group(survivals, requests, times)
    achieved = rate(survivals, requests, times, binned.max_draft_tokens)
    assert achieved >= 0.998 * rate(survivals, requests, times, exact.max_draft_tokens)
    assert binned.tokens == pytest.approx(achieved * binned.step_time_s, rel=5e-3)


def test_light_ranks_fill_up_to_the_level_the_heavy_rank_sets_for_nothing() -> None:
    """The maximum is paid once: below it every slot is free."""
    requests = np.array([40, 4, 4, 4])
    survivals = np.tile(np.array([[0.8, 0.5, 0.2]], np.float32), (52, 1))
    plan = plan_group(survivals, requests, group([curve([1, 200], [1.0, 20.0])] * 4, requests))
    assert (plan.max_draft_tokens[1:] == 12).all()
    assert plan.rule == "joint"


def test_the_heavy_rank_is_trimmed_when_the_whole_group_waits_for_it() -> None:
    """Alone it would verify more: its own tokens pay for its own time, but not for that of seven others."""
    rng = np.random.default_rng(3)
    requests = np.array([64] + [16] * 7)
    survivals = survivals_of(rng, int(requests.sum()))
    slope = curve([1, 600], [1.0, 13.0])
    plan = plan_group(survivals, requests, group([slope] * 8, requests))
    alone = search(survivals[:64], slope)
    assert plan.max_draft_tokens[0] < 0.5 * alone.max_draft_tokens


def test_one_rank_is_planned_like_an_isolated_node() -> None:
    rng = np.random.default_rng(5)
    for rows in (1, 3, 8):
        survivals = survivals_of(rng, rows)
        stairs = staircase(128, 8, 1.0, 0.15)
        plan = plan_group(survivals, np.array([rows]), group([stairs], [rows]))
        expected = search(survivals, stairs)
        if plan.rule == "joint":
            assert plan.max_draft_tokens[0] == expected.max_draft_tokens
            assert plan.min_survival[0] == pytest.approx(expected.min_survival)


def test_the_price_is_what_a_token_costs_the_group() -> None:
    """Only g: every rank pays rate * slope of g. Only f: the slowest rank pays, the others fill up."""
    requests = np.array([100, 10])
    rng = np.random.default_rng(0)
    survivals = survivals_of(rng, 110)
    level = curve([1, 10_000], [1.0, 1.0])
    shared = SharedTime(np.array([1.0, 10_000.0]), np.array([0.0, 100.0]))
    plan = plan_group(survivals, requests, group([level] * 2, requests, shared))
    assert plan.min_survival == pytest.approx(plan.throughput * 100 / 9999, abs=0.01)
    plan = plan_group(survivals, requests, group([curve([1, 1000], [1.0, 10.0])] * 2, requests))
    assert plan.min_survival[0] > 0.1
    assert plan.min_survival[1] == MIN_SURVIVAL


def test_ranks_that_are_slowest_together_share_the_price_of_the_level() -> None:
    """Trimming one of them alone saves no time."""
    requests = np.array([60, 60])
    rng = np.random.default_rng(0)
    half = survivals_of(rng, 60)
    slope = curve([1, 1000], [1.0, 10.0])
    both = plan_group(np.concatenate([half, half]), requests, group([slope] * 2, requests))
    expected = both.throughput * 9 / 999 / 2
    assert both.min_survival == pytest.approx([expected] * 2, rel=0.02)


@pytest.mark.parametrize("seed", range(6))
def test_survivals_as_planned_pass_the_price_up_to_the_budget(seed: int) -> None:
    """K and lambda say the same: on the survivals it was made from, neither cuts what the other admits."""
    rng = np.random.default_rng(seed)
    instances = [random_instance(rng) for _ in range(60)]
    requests = rng.integers(20, 60, 3)
    times = group([staircase(600, 32, 1.0, 0.2)] * 3, requests)
    instances.append((survivals_of(rng, int(requests.sum())), requests, times))
    for survivals, requests, times in instances:
        plan = plan_group(survivals, requests, times)
        ends = np.concatenate([[0], np.cumsum(requests)])
        for (a, b), budget in zip(itertools.pairwise(ends), plan.budgets(), strict=True):
            rows = survivals[a:b]
            lens = allocate(rows, budget.max_draft_tokens, budget.min_survival, np.full(b - a, 9))
            assert int(lens.sum()) == min(budget.max_draft_tokens, int((rows > 0).sum()))


def test_what_is_worth_nothing_is_not_verified() -> None:
    steep = group([curve([1, 2, 100], [1.0, 5.0, 500.0])] * 2, [2, 2])
    plan = plan_group(np.full((4, 4), 0.3, np.float32), np.array([2, 2]), steep)
    assert plan.rule == "none" and not plan.max_draft_tokens.any()
    assert (plan.min_survival == 1.0).all()
    hopeless = plan_group(np.zeros((4, 4), np.float32), np.array([2, 2]), steep)
    assert not hopeless.max_draft_tokens.any()


@pytest.mark.parametrize("rows", [0, 200])
def test_a_rank_without_requests_gets_nothing_and_costs_a_step(rows: int) -> None:
    requests = np.array([rows, 0])
    survivals = survivals_of(np.random.default_rng(0), rows)
    plan = plan_group(survivals, requests, group([staircase(2000, 64, 1.0, 0.1)] * 2, requests))
    assert plan.max_draft_tokens[1] == 0
    assert plan.rule == ("joint" if rows else "idle")
    assert plan.step_time_s >= 1.0


def test_a_common_length_is_used_when_the_gain_over_it_is_below_the_margin() -> None:
    rng = np.random.default_rng(1)
    requests = np.array([30, 30])
    survivals = survivals_of(rng, 60)
    times = group([curve([1, 500], [1.0, 6.0])] * 2, requests)
    free = plan_group(survivals, requests, times)
    lengths = [rate_uniform(survivals, requests, times, length) for length in range(8)]
    gain = free.throughput / max(lengths) - 1
    assert gain > 0.01
    assert plan_group(survivals, requests, times, gain * 0.9).rule == "joint"
    bound = plan_group(survivals, requests, times, gain * 1.1)
    assert bound.rule == "uniform"
    assert (bound.max_draft_tokens == 30 * int(np.argmax(lengths))).all()
    assert (bound.min_survival == 0.0).all()


def rate_uniform(survivals: Float32, requests: Int64, times: GroupTimes, length: int) -> float:
    gained = float(survivals[:, :length].sum(dtype=np.float64))
    return (len(survivals) + gained) / times.step_time_s(requests * length)


def test_the_plan_does_not_see_which_request_a_survival_belongs_to() -> None:
    """Ties and order inside a rank carry no value of a token: any order of the rows gives the same budgets."""
    rng = np.random.default_rng(2)
    survivals = np.cumprod(rng.choice([1.0, 0.8, 0.5], (20, 4)).astype(np.float32), axis=1)
    requests = np.array([12, 8])
    times = group([staircase(64, 8, 1.0, 0.3)] * 2, requests)
    plan = plan_group(survivals, requests, times)
    shuffled = np.concatenate([rng.permutation(survivals[:12]), rng.permutation(survivals[12:])])
    other = plan_group(shuffled, requests, times)
    assert (plan.max_draft_tokens == other.max_draft_tokens).all()
    assert (plan.min_survival == other.min_survival).all()


def test_a_plan_is_one_budget_a_rank() -> None:
    requests = np.array([2, 1])
    times = group([curve([1, 50], [1.0, 1.5])] * 2, requests)
    plan = plan_group(np.full((3, 4), 0.9, np.float32), requests, times)
    budgets = plan.budgets()
    assert [b.max_draft_tokens for b in budgets] == list(plan.max_draft_tokens) == [8, 4]
    assert [b.rule for b in budgets] == ["joint", "joint"]


def test_both_rankings_agree_on_what_a_rank_gains() -> None:
    rng = np.random.default_rng(4)
    requests = np.array([5, 0, 9])
    survivals = survivals_of(rng, 14)
    survivals[3] = 0.0
    exact = ExactSlots.of(survivals, requests)
    binned = BinnedSlots.of(survivals, requests)
    assert (exact.num == binned.num).all() and exact.num[0] == 28
    for drafts in ([0, 0, 0], [3, 0, 20], [28, 0, 63]):
        chosen = np.array(drafts)
        assert exact.expected(chosen) == pytest.approx(binned.expected(chosen), abs=0.1)
        assert exact.last_admitted(chosen) == pytest.approx(binned.last_admitted(chosen), abs=0.005)
    merged = binned.merged(8)
    assert merged.expected(np.array([9, 0, 9])) == pytest.approx(
        binned.expected(np.array([9, 0, 9])), abs=0.2
    )


def test_many_equal_survivals_are_cut_where_the_shared_cost_has_its_cliff() -> None:
    """A bin is not all or nothing: a quarter of it fits before the cliff, and no common length fits as well."""
    requests = np.array([96])
    survivals = np.full((96, 5), 0.6, np.float32)
    cliff = SharedTime(np.array([96.0, 226.0, 227.0, 600.0]), np.array([0.0, 0.0, 9.0, 9.0]))
    flat = curve([1, 600], [1.0, 1.0])
    plan = plan_group(survivals, requests, group([flat], requests, cliff))
    assert (plan.rule, plan.max_draft_tokens[0]) == ("joint", 120)


def test_the_plan_in_force_stays_until_another_is_clearly_better() -> None:
    rng = np.random.default_rng(7)
    requests = np.array([30, 30])
    survivals = survivals_of(rng, 60)
    times = group([curve([1, 500], [1.0, 6.0])] * 2, requests)
    best = plan_group(survivals, requests, times)
    near = np.maximum(best.max_draft_tokens - 1, 0)
    kept = plan_group(survivals, requests, times, incumbent=near)
    assert (kept.max_draft_tokens == near).all()
    far = np.zeros(2, np.int64)
    assert rate(survivals, requests, times, far) < 0.9 * best.throughput
    replaced = plan_group(survivals, requests, times, incumbent=far)
    assert (replaced.max_draft_tokens == best.max_draft_tokens).all()
    free = group([curve([1, 9], [1.0, 1.0])] * 2, requests)
    swollen = plan_group(survivals, requests, free, incumbent=np.array([10**6, 10**6]))
    assert swollen.max_draft_tokens.tolist() == [210, 210]
