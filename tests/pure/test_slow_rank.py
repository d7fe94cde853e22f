"""One rank of a lockstep group computes slower: joint budgets spare it, and by as much as trying all plans would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.cost import LockstepModel, RankStep
from actors.core.group_times import SharedTime, shared_of
from actors.core.messages import Endpoint, RankProfile
from actors.core.prefix_scheduler import search
from actors.core.sps import CostCurve, CurveError
from tests.pure.lockstep import curve
from tests.pure.slow_group import (
    SlowGroup,
    best_equal,
    best_split,
    own_s,
    survivals,
)

SLOW = (2.5, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("streams", [2, 3, 8])
def test_the_slow_rank_is_spared_as_much_as_the_best_plan_would(streams: int) -> None:
    group = SlowGroup(SLOW, streams)
    lengths, rate = group.serve(120)
    best, split = best_split(SLOW, streams)
    assert rate > 0.97 * best
    assert rate > 1.03 * best_equal(SLOW, streams)
    assert split[0] < split[1:].min(), "the case is one in which sparing pays"
    assert lengths[0] < 0.8 * lengths[1:].min()
    assert abs(lengths[0] - split[0]) < 0.3


def test_a_slow_rank_that_is_not_the_first_is_spared_too() -> None:
    lengths, _ = SlowGroup(SLOW[::-1], 3).serve(80)
    assert lengths[3] < 0.8 * lengths[:3].min()


def test_ranks_that_are_alike_are_treated_alike() -> None:
    lengths, rate = SlowGroup((1.0,) * 4, 3).serve(120)
    assert np.ptp(lengths) < 0.3
    assert rate > 0.95 * best_split((1.0,) * 4, 3)[0]


@pytest.mark.parametrize("measured", [(1.0,) * 4, SLOW[::-1]], ids=["alike", "another"])
def test_a_rank_that_grew_slow_after_it_was_measured_is_told_by_its_own_times(
    measured: tuple[float, ...],
) -> None:
    group = SlowGroup(SLOW, 3, measured_speed=measured)
    lengths, rate = group.serve(200)
    assert lengths[0] < 0.8 * lengths[1:].min()
    assert rate > 0.95 * best_split(SLOW, 3)[0]
    model = group.solver.model_of("rank-0")
    assert model is not None and model.is_trusted
    assert model.rank_scale[0] / model.rank_scale[1:].max() == pytest.approx(2.5, rel=0.1)


def test_the_time_of_the_group_alone_does_not_say_who_held_it_up() -> None:
    """As on a GPU, whose clock the host does not read: ranks are planned as if they were alike."""
    lengths, _ = SlowGroup(SLOW, 3, is_told=False).serve(80)
    assert lengths[0] > 0.8 * lengths[1:].min()


# --- the parts -------------------------------------------------------------------------------------------------------


def profile(shared_s: np.ndarray | None) -> RankProfile:
    rank, none = Endpoint("rank-0", "target", "", "", "a"), np.zeros(3)
    sizes = np.array([1, 8, 64], np.int32)
    return RankProfile(rank, "here", sizes, sizes, np.array([1.0, 2.0, 9.0]), none, 3, shared_s)


def test_a_curve_is_told_apart_into_a_rank_s_own_part_and_what_its_group_shares() -> None:
    assert CostCurve.of(profile(None)).own is None
    found = CostCurve.of(profile(np.array([0.4, 0.5, 3.0])))
    assert found.own is not None
    assert found.own.step_time_s.tolist() == pytest.approx([0.6, 1.5, 6.0])
    assert found.step_time_s.tolist() == [1.0, 2.0, 9.0]
    slower = replace(found, own_time_s=np.array([0.7, 1.5, 7.0]))
    shared = shared_of([found, slower])
    assert shared.tokens.tolist() == [2.0, 16.0, 128.0]
    assert shared.seconds.tolist() == pytest.approx([0.3, 0.5, 2.0])


@pytest.mark.parametrize("shared_s", [np.array([0.1]), np.array([0.1, -0.1, 0.2])])
def test_a_shared_part_that_cannot_be_is_refused(shared_s: np.ndarray) -> None:
    with pytest.raises(CurveError, match=r"shared_time_s|lengths"):
        CostCurve.of(profile(shared_s))


def test_an_own_time_moves_its_rank_s_factor_and_no_other() -> None:
    model = LockstepModel(2)
    model.measured(np.ones(2), SharedTime(np.array([16.0, 64.0]), np.array([0.5, 1.0])))
    steps = [RankStep(curve([1, 9], [1.0, 2.0], draft_s=0.5), 4, 9)] * 2
    assert model.predict_s(steps) == pytest.approx(0.5 + 2.0 + 0.5, rel=0.05)
    for _ in range(120):
        model.fold(steps, 0.5 + 6.0 + 0.5, [6.0, 0.0])
    assert model.rank_scale.tolist() == pytest.approx([3.0, 1.0], rel=0.02)
    assert model.predict_s(steps) == pytest.approx(7.0, rel=0.02)
    assert model.prediction_error < 0.05
    before = model.rank_scale.copy()
    model.fold(steps, 7.0)
    assert (model.rank_scale == before).all(), "nobody told its own time"


def test_a_profile_of_another_hour_is_forgotten_within_a_few_steps() -> None:
    """Every change of policy begins with the profile: it may have been taken beside something else."""
    model = LockstepModel(2)
    model.measured(np.ones(2), SharedTime.none())
    steps = [RankStep(curve([1, 9], [1.0, 2.0]), 0, 9)] * 2
    rng = np.random.default_rng(0)
    for _ in range(30):
        own = np.array([8.0, 0.5]) * rng.lognormal(0.0, 0.1, 2)
        model.fold(steps, float(own.max()), own.tolist())
        assert model.is_trusted
    assert model.rank_scale.tolist() == pytest.approx([4.0, 0.25], rel=0.1)


@pytest.mark.parametrize(("noise", "is_trusted"), [(0.6, True), (1.5, False)])
def test_times_that_jump_about_are_not_the_model_s_fault_within_bounds(
    noise: float, is_trusted: bool
) -> None:
    model = LockstepModel(2)
    model.measured(np.ones(2), SharedTime.none())
    steps = [RankStep(curve([1, 9], [1.0, 2.0]), 0, 9)] * 2
    rng, seen = np.random.default_rng(1), []
    for _ in range(300):
        own = np.full(2, 2.0 * np.exp(noise * rng.choice([-1.0, 1.0])))
        model.fold(steps, float(own[0]), own.tolist())
        seen.append(model.is_trusted)
    assert (np.mean(seen[100:]) > 0.5) == is_trusted
    assert set(seen[100:]) == {is_trusted}


def test_all_wait_for_the_rank_whose_blocks_come_last() -> None:
    model = LockstepModel(2)
    model.measured(np.ones(2), SharedTime.none())
    drafts = curve([1, 9], [1.0, 2.0], draft_s=0.5)
    times = model.times([RankStep(drafts, 4, 9), RankStep(drafts, 0, 1)])
    assert times.offset_s.tolist() == pytest.approx([0.5, 0.5])


# --- ranks of their own ----------------------------------------------------------------------------------------------


class Rank:
    """One that waits for nobody: seconds of a round over its tokens."""

    def __init__(self, slower: float, drafting_s: float) -> None:
        self._slower, self._drafting_s = slower, drafting_s

    def step_time_s_at(self, num_requests: int, batch_tokens: object) -> np.ndarray:
        assert num_requests
        tokens = np.asarray(batch_tokens, np.float64)
        return self._drafting_s + self._slower * own_s(tokens)


def test_a_rank_of_its_own_that_is_slower_throughout_verifies_as_much_for_as_many_streams() -> None:
    """Tokens over time have their maximum where they had it, whatever the unit of time. Only drafting elsewhere, which
    takes no longer for it, makes its tokens dearer beside the rest of a round."""
    rows = survivals(np.random.default_rng(2), 8)
    budgets = [search(rows, Rank(slower, 0.0)).max_draft_tokens for slower in (1.0, 2.5)]
    assert budgets[0] == budgets[1] > 0
    drafted = [search(rows, Rank(slower, 0.15)).max_draft_tokens for slower in (1.0, 2.5)]
    assert drafted[0] > drafted[1]
