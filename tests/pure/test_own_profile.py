"""A rank's own curve is used, or refused aloud; and what is foretold is compared with what came."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.capacity import Allocator
from actors.core.local_policy import LocalPolicy
from actors.core.messages import StepReport
from actors.core.own_profile import OwnProfile, StepTimes
from actors.core.prediction import PredictionError
from actors.core.sps import CostCurve, RankTimes
from actors.core.verify_decision import StepFacts
from tests.pure.rank_harness import RANK, Session, admitted, make_rank

POINTS = np.array([1, 4, 16])
RISING, FLAT = np.array([0.010, 0.012, 0.030]), np.array([0.010, 0.0101, 0.0101])


def own(step_time_s: np.ndarray, times: RankTimes | None = None) -> OwnProfile:
    measured = StepTimes(POINTS, POINTS, step_time_s)
    return OwnProfile(RANK, "here", measured, 3, times or RankTimes())


def test_a_good_curve_is_learned_and_says_nothing() -> None:
    times = RankTimes()
    profile = own(RISING, times)
    assert profile.problem == "" and times.doubt == ""
    assert profile.message.gamma == 3 and times.curve is not None
    assert times.curve.step_time_s.tolist() == RISING.tolist()


def test_a_new_drafter_adds_its_time_to_every_round() -> None:
    times = RankTimes()
    profile = own(RISING, times)
    profile.take_draft_times([(1, 0.001), (8, 0.008)])
    assert profile.message.draft_time_s.tolist() == pytest.approx([0.001, 0.004, 0.016])
    assert times.step_time_s_at(4, 4) == pytest.approx(0.012 + 0.004)


@pytest.mark.parametrize(
    ("step_time_s", "says"),
    [(FLAT, "is flat (1 to 16 tokens"), (np.array([0.01, np.nan, 0.03]), "step_time_s: nan")],
)
def test_a_curve_that_cannot_be_used_is_refused_in_a_sentence_with_a_remedy(
    step_time_s: np.ndarray, says: str
) -> None:
    times = RankTimes()
    profile = own(step_time_s, times)
    assert says in profile.problem and "again" in profile.problem
    assert times.doubt in ("flat_curve", "cold")


def test_no_points_at_all_are_refused_too() -> None:
    times = RankTimes()
    none = np.zeros(0)
    measured = StepTimes(np.zeros(0, np.int64), np.zeros(0, np.int64), none)
    assert "no points" in OwnProfile(RANK, "here", measured, 3, times).problem
    assert times.doubt == "cold"


# --- never silently everything --------------------------------------------------------------------------------------

LIKELY, UNLIKELY = [0.9, 0.7, 0.6], [0.3, 0.2, 0.1]


@pytest.mark.parametrize("name", ["algorithm1", "lagged"])
@pytest.mark.parametrize("curve", ["flat", "absent", "mistrusted"])
def test_without_a_curve_to_trust_only_likely_tokens_are_verified_and_the_rule_says_why(
    name: str, curve: str
) -> None:
    policy = LocalPolicy(name)  # type: ignore[arg-type]
    if curve != "absent":
        own(FLAT if curve == "flat" else RISING, policy.times)
    if curve == "mistrusted":
        for _ in range(100):
            policy.times.fold(1, 1, 0, 0.010)
            policy.times.fold(16, 16, 0, 0.300)
    session = Session(make_rank(policy), error=0.2)
    session.submit(admitted("a", [3, 1, 4], 60))
    session.run()
    decided = [d for d in session.decisions if d.has_draft.any()][3:]
    rules = {"flat": "flat_curve", "absent": "cold", "mistrusted": "curve_mistrusted"}
    assert {d.choice.rule.removeprefix("local_") for d in decided} == {rules[curve]}
    assert {d.choice.min_survival for d in decided} == {0.5}
    survivals = np.array([LIKELY, UNLIKELY], np.float32)
    facts = StepFacts(9, survivals, np.full(2, 3, np.int32), 7, survivals, 0, 0)
    choice = policy.choose(facts)
    lens = (survivals >= choice.min_survival).sum(axis=1)
    assert lens.tolist() == [3, 0] and choice.min_survival == 0.5


def flat_allocator() -> Allocator:
    allocator = Allocator()
    allocator.fold(own(FLAT).message, 0.0)
    return allocator


def report(step: int, rule: str = "lagged", step_time_s: float = 0.01) -> StepReport:
    counts = np.ones(3, np.int64)
    survivals = np.array([LIKELY], np.float32)
    return StepReport(
        RANK, step, step_time_s, 0.0, 1, 0, 4, 8, survivals, counts, counts, counts, 2, 9, 9, 0, rule, 3,
    )  # fmt: skip


def test_the_allocator_prices_a_flat_curve_and_counts_it_as_refused() -> None:
    allocator = flat_allocator()
    allocator.fold(report(1), 0.0)
    (budget,) = allocator.budgets(0.0)
    assert (budget.rule, budget.min_survival) == ("flat_curve", 0.5)
    assert allocator.load_view(0.0).num_refused_curves == 1
    none, no_times = np.zeros(0, np.int32), np.zeros(0)
    empty = replace(
        own(RISING).message,
        batch_tokens=none, num_requests=none, step_time_s=no_times, draft_time_s=no_times,
    )  # fmt: skip
    with pytest.raises(ValueError, match="points"):
        allocator.fold(empty, 0.0)
    assert allocator.load_view(0.0).num_refused_curves == 2


def test_steps_without_a_search_are_counted_by_their_rule() -> None:
    allocator = Allocator()
    rules = ["lagged", "local_cold", "curve_mistrusted", "joint", "local_flat_curve", "no_drafts"]
    for step, rule in enumerate(rules):
        allocator.fold(report(step, rule), 0.0)
    (load,) = allocator.load_view(0.0).ranks
    assert load.num_fallback_steps == 3
    assert load.prediction_error is None, "there is no curve to predict from"


# --- prediction against measurement ---------------------------------------------------------------------------------


def test_the_error_is_that_of_predictions_made_before_their_step_was_learned_from() -> None:
    times = RankTimes(CostCurve.of(own(RISING).message))
    times.fold(4, 4, 0, 0.024, draft_wait_s=0.0)
    assert times.error.value == pytest.approx(1.0), "twice the 0.012 s of the curve"
    for _ in range(400):
        times.fold(4, 4, 0, 0.024, draft_wait_s=0.0)
    assert times.error.value is not None and times.error.value < 0.03
    times.measured(CostCurve.of(own(RISING).message))
    assert times.error.value is None, "what was foretold from another curve says nothing"


def test_the_allocator_tells_the_error_of_every_rank() -> None:
    allocator = Allocator()
    allocator.fold(own(RISING).message, 0.0)
    for step in range(2):  # no correction yet: it needs eight steps of one size
        allocator.fold(report(step, step_time_s=0.012 * 1.1), 0.0)
    (load,) = allocator.load_view(0.0).ranks
    assert load.prediction_error == pytest.approx(0.1)


def test_one_stalled_step_is_bounded_and_fades() -> None:
    error = PredictionError()
    for _ in range(50):
        error.note(1.0, 1.0)
    error.note(1.0, 1e6)
    assert error.value is not None and error.value < 0.2
    error.note(0.0, 1.0)
    error.note(1.0, -1.0)
    assert error.num_steps == 51
