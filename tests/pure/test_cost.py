"""The lockstep step-time model: what it predicts, what it learns from served steps, and when it gives up."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.cost import (
    CALIBRATION_STEPS,
    MIN_SERVED_STEPS,
    SURPRISES_TO_RESTART,
    LockstepModel,
    RankStep,
)
from actors.core.group_times import GroupTimes, SharedTime, drafting_s, split_profiles
from actors.core.sps import CostCurve
from tests.pure.lockstep import curve, group, random_curve, staircase

TRUE = staircase(1024, 64, 0.020, 0.004)


def steps_of(
    rng: np.random.Generator, prior: CostCurve, num_ranks: int, context: int = 0
) -> list[RankStep]:
    requests = rng.integers(5, 60, num_ranks)
    tokens = (requests * rng.uniform(1, 6, num_ranks)).astype(int)
    return [
        RankStep(prior, int(r), int(b), context * int(r))
        for r, b in zip(requests, tokens, strict=True)
    ]


def true_time_s(steps: list[RankStep], shared: SharedTime) -> float:
    own = max(float(TRUE.verify_time_s(step.batch_tokens)) for step in steps)
    return own + float(shared(sum(step.batch_tokens for step in steps)))


def median_error(
    model: LockstepModel, rng: np.random.Generator, prior: CostCurve, shared: SharedTime, num: int
) -> float:
    """Serve `num` steps and learn from each; the median error over the last quarter, before learning."""
    errors = []
    for _ in range(num):
        steps = steps_of(rng, prior, len(model.rank_scale))
        served = true_time_s(steps, shared) * float(np.exp(rng.normal(0, 0.01)))
        errors.append(abs(np.log(model.predict_s(steps) / served)))
        model.fold(steps, served)
    return float(np.median(errors[-num // 4 :]))


def test_the_slowest_rank_and_the_sum_make_the_step() -> None:
    shared = SharedTime(np.array([0.0, 100.0]), np.array([0.0, 10.0]))
    times = group([curve([1, 101], [1.0, 11.0])] * 2, [1, 21], shared)
    assert times.rank_times_s([0, 0]).tolist() == [1.0, 3.0]
    assert times.step_time_s([0, 0]) == pytest.approx(3.0 + 2.2)
    assert times.step_time_s([30, 0]) == pytest.approx(4.0 + 5.2)
    assert times.rank_times_s(np.array([[0, 10], [0, 10]])).tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("seed", range(20))
def test_the_most_drafts_within_a_level_is_exact_to_a_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curves = [random_curve(rng, 30), random_curve(rng, 30)]
    times = GroupTimes(
        tuple(curves), rng.uniform(0.5, 2, 2), rng.uniform(0, 1, 2), rng.integers(1, 9, 2)
    )
    drafts = np.broadcast_to(np.arange(60), (2, 60))
    reached = times.rank_times_s(drafts)
    most = times.most_drafts(np.unique(reached))
    for rank in range(2):
        for level, found in zip(np.unique(reached), most[rank], strict=True):
            within = np.flatnonzero(reached[rank] <= level * (1 + 1e-9))
            assert min(found, 59) == (within[-1] if len(within) else -1)


def test_a_level_that_nothing_ever_passes_admits_everything() -> None:
    flat = group([curve([1], [1.0])], [4])
    assert flat.most_drafts(np.array([0.5, 1.0])).tolist() == [[-1, 2**31]]


def test_shared_time_goes_on_beyond_its_last_knot() -> None:
    shared = SharedTime(np.array([10.0, 20.0]), np.array([1.0, 3.0]))
    assert shared([0, 10, 15, 30]).tolist() == [1.0, 1.0, 2.0, 5.0]
    assert SharedTime.none()([0, 1000]).tolist() == [0.0, 0.0]


def test_drafting_is_part_of_a_rank_s_time() -> None:
    model = LockstepModel(2)
    steps = [RankStep(curve([1, 9], [1.0, 2.0], draft_s=0.5), 3, 9)] * 2
    assert drafting_s(steps[0].curve, 3) == pytest.approx(0.5)
    assert model.predict_s(steps) == pytest.approx(2.5)


@pytest.mark.parametrize("prior_error", [0.7, 1.0, 1.4])
def test_a_group_s_time_is_learned_from_served_steps(prior_error: float) -> None:
    """Curves measured too low or too high, and a shared part that no curve of one rank holds."""
    rng = np.random.default_rng(0)
    prior = staircase(1024, 64, 0.020 * prior_error, 0.004 * prior_error)
    shared = SharedTime(np.array([1.0, 4000.0]), np.array([0.004, 0.04]))
    model = LockstepModel(8)
    assert median_error(model, rng, prior, shared, 600) < 0.02
    assert model.prediction_error < 0.03
    assert model.is_trusted


def test_what_the_group_shares_is_told_from_what_the_slowest_rank_does() -> None:
    """Under uneven load the two parts can be told apart, and trimming is priced by the right one."""
    rng = np.random.default_rng(1)
    shared = SharedTime(np.array([1.0, 4000.0]), np.array([0.0, 0.08]))
    model = LockstepModel(8)
    median_error(model, rng, TRUE, shared, 1500)
    base = [RankStep(TRUE, 40, 60)] * 8
    times = model.times(base)
    light = np.zeros(8, int)
    one, all_others = light.copy(), light.copy()
    one[0], all_others[1:] = 100, 100
    for drafts in (one, all_others):
        grown = [RankStep(TRUE, 40, 60 + int(k)) for k in drafts]
        expected = true_time_s(grown, shared) - true_time_s(base, shared)
        assert times.step_time_s(drafts) - times.step_time_s(light) == pytest.approx(
            expected, rel=0.35
        )


def test_a_slow_rank_gets_its_own_factor() -> None:
    rng = np.random.default_rng(2)
    model = LockstepModel(4)
    for _ in range(1500):
        steps = steps_of(rng, TRUE, 4)
        own = [float(TRUE.verify_time_s(step.batch_tokens)) for step in steps]
        own[2] *= 1.3
        model.fold(steps, max(own))
    others = np.delete(model.rank_scale, 2)
    assert model.rank_scale[2] / others.mean() == pytest.approx(1.3, abs=0.08)


def test_a_stalled_step_moves_little_and_is_counted() -> None:
    rng = np.random.default_rng(3)
    model = LockstepModel(2)
    median_error(model, rng, TRUE, SharedTime.none(), 300)
    steps = steps_of(rng, TRUE, 2)
    before, outliers = model.predict_s(steps), model.num_outliers
    model.fold(steps, 100 * before)
    assert model.num_outliers == outliers + 1
    assert model.predict_s(steps) == pytest.approx(before, rel=0.1)
    model.fold(steps, float("nan"))
    assert model.num_outliers == outliers + 2


def test_a_new_regime_is_not_an_outlier_for_ever() -> None:
    rng = np.random.default_rng(4)
    model = LockstepModel(2)
    median_error(model, rng, TRUE, SharedTime.none(), 300)
    for _ in range(SURPRISES_TO_RESTART):
        steps = steps_of(rng, TRUE, 2)
        model.fold(steps, 3 * true_time_s(steps, SharedTime.none()))
    assert not model.is_trusted
    errors = []
    for _ in range(300):
        steps = steps_of(rng, TRUE, 2)
        served = 3 * true_time_s(steps, SharedTime.none())
        errors.append(abs(model.predict_s(steps) / served - 1))
        model.fold(steps, served)
    assert model.num_restarts >= 1
    assert model.is_trusted
    assert np.median(errors[-100:]) < 0.05


def test_a_model_whose_predictions_part_from_the_steps_is_not_trusted() -> None:
    rng = np.random.default_rng(5)
    model = LockstepModel(2)
    for at in range(4 * MIN_SERVED_STEPS):
        steps = steps_of(rng, TRUE, 2)
        assert model.is_trusted or at >= MIN_SERVED_STEPS
        model.fold(steps, float(np.exp(rng.uniform(-3, 3))) * 0.03)
    assert not model.is_trusted
    assert model.prediction_error > 0.4


def test_context_is_priced_when_steps_show_that_it_costs() -> None:
    rng = np.random.default_rng(6)
    model = LockstepModel(1)
    for _ in range(800):
        context = int(rng.integers(0, 8000))
        steps = steps_of(rng, TRUE, 1, context)
        seconds = true_time_s(steps, SharedTime.none()) + 5e-8 * steps[0].context_tokens
        model.fold(steps, seconds)
    short, long = RankStep(TRUE, 40, 100, 0), RankStep(TRUE, 40, 100, 300_000)
    assert model.predict_s([long]) - model.predict_s([short]) == pytest.approx(0.015, rel=0.3)


def two_profiles(shared: SharedTime, num_ranks: int) -> tuple[CostCurve, CostCurve]:
    """What measuring a group shows with one rank loaded, and with all loaded alike."""
    tokens = TRUE.batch_tokens
    return (
        curve(tokens, TRUE.step_time_s + shared(tokens)),
        curve(tokens, TRUE.step_time_s + shared(tokens * num_ranks)),
    )


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_two_profiles_of_a_group_tell_its_two_parts_apart(num_ranks: int) -> None:
    """Up to a constant, which cannot be seen: the time of any uneven load follows."""
    shared = SharedTime(np.array([0.0, 1000.0, 8000.0]), np.array([0.002, 0.02, 0.06]))
    own, found = split_profiles(*two_profiles(shared, num_ranks), num_ranks)
    for loads in (
        [1000] + [0] * (num_ranks - 1),
        [64] * num_ranks,
        [900] + [100] * (num_ranks - 1),
    ):
        true = float(TRUE.verify_time_s(max(loads)) + shared(sum(loads)))
        predicted = float(own.verify_time_s(max(loads)) + found(sum(loads)))
        assert predicted == pytest.approx(true, rel=0.08)


def test_one_rank_has_nothing_to_split() -> None:
    own, shared = split_profiles(TRUE, TRUE, 1)
    assert own is TRUE
    assert float(shared(10_000)) == 0.0


def test_a_model_that_knows_what_is_shared_predicts_uneven_load_from_the_first_step() -> None:
    rng = np.random.default_rng(8)
    shared = SharedTime(np.array([0.0, 4000.0]), np.array([0.0, 0.08]))
    own, found = split_profiles(*two_profiles(shared, 8), 8)
    knowing, ignorant = LockstepModel(8, found), LockstepModel(8)
    errors: dict[str, list[float]] = {"knowing": [], "ignorant": []}
    for _ in range(20):
        steps = steps_of(rng, own, 8)
        served = true_time_s(steps, shared)
        for name, model in (("knowing", knowing), ("ignorant", ignorant)):
            errors[name].append(abs(model.predict_s(steps) / served - 1))
            model.fold(steps, served)
    assert errors["knowing"][0] < 0.05
    assert max(errors["knowing"]) < 0.1 < errors["ignorant"][0]


@pytest.mark.parametrize("factor", [0.2, 1.0, 8.0])
def test_a_machine_that_is_slower_throughout_is_known_after_four_steps(factor: float) -> None:
    """Curves are measured while nothing else runs; ranks that share a machine then serve at another pace."""
    rng = np.random.default_rng(11)
    known = SharedTime(np.array([0.0, 400.0]), np.array([0.0, 0.01]))
    model = LockstepModel(3, known)
    errors = []
    for _ in range(40):
        steps = steps_of(rng, TRUE, 3)
        served = factor * true_time_s(steps, known) * float(np.exp(rng.normal(0, 0.02)))
        errors.append(abs(np.log(model.predict_s(steps) / served)))
        model.fold(steps, served)
    assert max(errors[CALIBRATION_STEPS:]) < 0.1
    assert model.is_trusted and model.prediction_error < 0.06
    assert model.num_restarts == 0


def test_one_stalled_step_at_the_start_is_not_taken_for_the_pace_of_the_machine() -> None:
    rng = np.random.default_rng(12)
    model = LockstepModel(3)
    for at in range(CALIBRATION_STEPS):
        steps = steps_of(rng, TRUE, 3)
        model.fold(steps, true_time_s(steps, SharedTime.none()) * (20.0 if at == 1 else 1.0))
    steps = steps_of(rng, TRUE, 3)
    exact = true_time_s(steps, SharedTime.none())
    assert model.predict_s(steps) == pytest.approx(exact, rel=0.35)
