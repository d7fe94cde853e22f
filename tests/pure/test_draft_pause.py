"""Drafting stops where it costs more than it brings, and is always found again when it would pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.capacity import LocalPolicy, PolicyName
from actors.core.draft_pause import (
    CHECK_EVERY,
    KEPT_ROWS,
    MARGIN,
    MIN_PAUSE,
    MIN_ROWS,
    PROBE_EVERY,
    DraftPause,
    NeverDraft,
    drafting_gain,
)
from actors.core.messages import RankProfile
from actors.core.prefix_scheduler import LAG_STEPS
from actors.core.sps import CostCurve, RankTimes
from actors.core.verify_decision import DraftFacts
from tests.pure.scripted_drafter import RANK

GAMMA = 3


def measured(draft_s: float = 0.02, token_s: float = 0.125) -> RankTimes:
    """A step costs a second up to 8 tokens and `token_s` for each one more; drafting costs `draft_s` a request."""
    sizes = np.array([1, 8, 64, 128], np.int32)
    profile = RankProfile(
        RANK, "", sizes, sizes, 1.0 + token_s * np.array([0, 0, 56, 120]), draft_s * sizes, GAMMA
    )
    times = RankTimes()
    times.measured(CostCurve.of(profile))
    return times


def blocks(count: int, confidence: float = 0.8) -> np.ndarray:
    return np.cumprod(np.full((count, GAMMA), confidence, np.float32), axis=1)


def facts(
    num_rounds: int, step: int = 0, askable: int | None = None, room: int = 999
) -> DraftFacts:
    return DraftFacts(step, num_rounds if askable is None else askable, num_rounds, 0, room)


@dataclass
class Run:
    """A pause under a load: every block that is asked for comes, one step later."""

    pause: DraftPause
    confidence: float = 0.8
    step: int = 0
    asked: list[int] = field(default_factory=list)  # rows a step
    events: list[str] = field(default_factory=list)

    def go(self, steps: int, num_rounds: int) -> None:
        for _ in range(steps):
            choice = self.pause.choose(facts(num_rounds, self.step))
            self.asked.append(int(choice.asks.sum()))
            self.events.append(choice.event)
            if choice.asks.any():
                self.pause.note(self.step, blocks(self.asked[-1], self.confidence))
            self.step += 1

    def until(self, happened: Callable[[], bool], num_rounds: int, most: int = 500) -> int:
        """Steps until then."""
        for steps in range(most):
            if happened():
                return steps
            self.go(1, num_rounds)
        raise AssertionError("it never happens")


# --- the comparison --------------------------------------------------------------------------------------------------


def test_drafting_pays_alone_and_not_in_a_crowd() -> None:
    times = measured()
    assert drafting_gain(blocks(1), facts(1), times) > 2.0
    assert drafting_gain(blocks(32), facts(32), times) < 1.0 - MARGIN


def test_the_gain_is_the_best_throughput_over_that_of_plain_decoding() -> None:
    times = measured()
    assert times.curve is not None
    # One request, all three slots: 1 + 0.8 + 0.64 + 0.512 tokens in 1.02 s, or one token in 1 s.
    assert drafting_gain(blocks(1), facts(1), times) == pytest.approx(2.952 / 1.02)
    # Nothing is verified: only the time of drafting is lost.
    assert drafting_gain(blocks(32, 0.01), facts(32), times) == pytest.approx(4.0 / 4.64)


def test_many_blocks_are_averaged_not_added() -> None:
    times = measured()
    one = drafting_gain(blocks(1), facts(1), times)
    assert drafting_gain(blocks(50), facts(1), times) == pytest.approx(one)


def test_rows_without_drafts_weigh_on_the_step_only() -> None:
    times = measured()
    all_of_them = drafting_gain(blocks(4), facts(4), times)
    some = drafting_gain(blocks(4), facts(4, askable=1), times)
    assert 1.0 < some < all_of_them


def test_without_room_for_drafts_drafting_only_costs() -> None:
    assert drafting_gain(blocks(1), facts(1, room=0), measured()) == pytest.approx(1.0 / 1.02)


def test_a_gain_the_policy_finds_too_small_is_none() -> None:
    times = measured()
    assert drafting_gain(blocks(1, 0.3), facts(1), times, 0.0) > 1.3
    assert drafting_gain(blocks(1, 0.3), facts(1), times, 0.9) == pytest.approx(1.0 / 1.02)


def test_waits_dearer_than_measured_stop_the_drafting() -> None:
    times = measured(draft_s=0.001)
    pause = DraftPause(times)
    run = Run(pause, confidence=0.5)
    run.go(20, 12)
    assert not pause.is_paused
    for _ in range(40):
        times.fold(12, 12, 0, 1.5, 1.5, 12)
    run.go(CHECK_EVERY + 1, 12)
    assert pause.is_paused


# --- while drafting pays, and when it ceases to -----------------------------------------------------------------------


def test_one_stream_is_drafted_for_in_every_step() -> None:
    run = Run(DraftPause(measured()))
    run.go(300, 1)
    assert run.asked == [1] * 300 and not any(run.events)


def test_one_bad_block_does_not_stop_the_drafting_for_a_single_stream() -> None:
    run = Run(DraftPause(measured()))
    for _ in range(40):
        run.confidence = 0.0
        run.go(1, 1)
        run.confidence = 0.9
        run.go(2, 1)
    assert run.asked == [1] * 120


def test_a_crowd_stops_the_drafting_within_a_few_steps() -> None:
    run = Run(DraftPause(measured()))
    steps = run.until(lambda: run.pause.is_paused, 32)
    assert steps <= LAG_STEPS + CHECK_EVERY + 1
    assert run.events[-1] == "pause" and run.asked[-1] == 0


def test_most_steps_of_a_crowd_draft_nothing_and_a_probe_is_for_few_rows() -> None:
    run = Run(DraftPause(measured()))
    run.go(1000, 32)
    late = run.asked[20:]
    assert set(late) == {0, MIN_ROWS}
    assert late.count(MIN_ROWS) <= len(late) / PROBE_EVERY + 1
    assert run.events.count("probe") == run.asked.count(MIN_ROWS) >= 20
    assert run.events.count("pause") == 1


# --- no absorbing state (C31) -----------------------------------------------------------------------------------------


def test_load_from_one_to_many_to_one_is_followed() -> None:
    run = Run(DraftPause(measured()))
    run.go(50, 1)
    run.go(200, 32)
    assert run.pause.is_paused
    fallen = run.step
    run.until(lambda: not run.pause.is_paused, 1)
    assert run.step - fallen <= MIN_PAUSE + MIN_ROWS + LAG_STEPS + 1
    first = next(i for i in range(fallen, run.step) if run.asked[i])
    assert first - fallen <= MIN_PAUSE, "its blocks are asked for at once, as probes"
    run.go(100, 1)
    assert run.asked[-100:] == [1] * 100


@pytest.mark.parametrize("num_rounds", [1, 3, 8, 12])
def test_acceptance_that_recovers_is_found_within_a_bound(num_rounds: int) -> None:
    run = Run(DraftPause(measured(0.1, token_s=0.02)), confidence=0.02)
    run.go(120, num_rounds)
    assert run.pause.is_paused
    run.confidence = 0.97
    steps = run.until(lambda: not run.pause.is_paused, num_rounds)
    probe = -(-MIN_ROWS // num_rounds)
    # In the worst case a probe under way has seen the old acceptance.
    assert steps <= PROBE_EVERY + 2 * (probe + LAG_STEPS) + 1
    assert run.events[-1] == "resume" and run.asked[-1] == num_rounds


def test_a_small_change_of_load_is_no_reason_to_probe() -> None:
    run = Run(DraftPause(measured()))
    run.until(lambda: run.pause.is_paused, 32)
    run.go(MIN_PAUSE + 4, 27)
    assert "probe" not in run.events
    run.go(1, 24)
    assert run.events[-1] == "probe"


def test_probes_whose_blocks_never_come_are_repeated() -> None:
    run = Run(DraftPause(measured()))
    run.until(lambda: run.pause.is_paused, 32)
    probes = 0
    for _ in range(10 * PROBE_EVERY):
        choice = run.pause.choose(facts(32, run.step))
        probes += choice.event == "probe"
        run.step += 1
    assert probes >= 8 and run.pause.is_paused
    run.until(lambda: not run.pause.is_paused, 1)


def test_all_rows_take_their_turns_as_probes() -> None:
    pause = DraftPause(measured())
    run = Run(pause)
    run.until(lambda: pause.is_paused, 20)
    seen = np.zeros(20, int)
    for _ in range(6 * PROBE_EVERY):
        choice = pause.choose(facts(20, run.step))
        seen += choice.asks
        run.step += 1
    assert seen.min() >= 1


def test_with_nobody_who_could_use_a_block_nothing_is_asked_and_nothing_breaks() -> None:
    run = Run(DraftPause(measured()))
    run.until(lambda: run.pause.is_paused, 32)
    for step in range(run.step, run.step + 100):
        assert not run.pause.choose(facts(5, step, askable=0)).asks.any()
    run.step += 100
    run.until(lambda: not run.pause.is_paused, 1)


# --- hysteresis -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [1.0 - MARGIN / 2, 1.0, 1.0 + MARGIN / 2])
def test_between_the_margins_nothing_changes(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(DraftPause(measured()))
    monkeypatch.setattr("actors.core.draft_pause.drafting_gain", lambda *_: gain)
    run.go(200, 32)
    assert not any(run.events)
    monkeypatch.setattr("actors.core.draft_pause.drafting_gain", lambda *_: 1.0 - 2 * MARGIN)
    run.go(CHECK_EVERY, 32)
    assert run.pause.is_paused
    monkeypatch.setattr("actors.core.draft_pause.drafting_gain", lambda *_: gain)
    run.go(200, 32)
    assert run.pause.is_paused and "resume" not in run.events
    monkeypatch.setattr("actors.core.draft_pause.drafting_gain", lambda *_: 1.0 + 2 * MARGIN)
    run.go(PROBE_EVERY + LAG_STEPS + 1, 32)
    assert not run.pause.is_paused


# --- the law ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_who_is_asked_never_depends_on_survivals_of_the_step_before(seed: int) -> None:
    """C3: from the same survivals up to step t - 2 come the same questions for step t."""
    rng = np.random.default_rng(seed)
    rounds = rng.choice([1, 2, 6, 12, 32], size=6).repeat(20)
    runs = [DraftPause(measured(0.05)), DraftPause(measured(0.05))]
    for step, count in enumerate(rounds.tolist()):
        choices = [pause.choose(facts(count, step)) for pause in runs]
        assert np.array_equal(choices[0].asks, choices[1].asks)
        num = int(choices[0].asks.sum())
        if not num:
            continue
        old = blocks(num, float(rng.choice([0.02, 0.5, 0.97])))
        for pause in runs:
            pause.note(step, old)
        # Another step `step` with other survivals: the question for `step + 1` stays the same.
        other = _copy(runs[1])
        step_back, _ = other._seen.pop()
        other._seen.append((step_back, blocks(num, float(rng.choice([0.02, 0.5, 0.97])))))
        following = int(rounds[min(step + 1, len(rounds) - 1)])
        one = _copy(runs[0]).choose(facts(following, step + 1))
        two = other.choose(facts(following, step + 1))
        assert np.array_equal(one.asks, two.asks) and one.event == two.event


def _copy(pause: DraftPause) -> DraftPause:
    values = dict(vars(pause))
    values["_seen"] = values["_seen"].copy()
    copied = DraftPause(pause.times)
    vars(copied).update(values)
    return copied


# --- what else ends or forbids a pause ---------------------------------------------------------------------------------


def test_without_a_curve_to_judge_by_blocks_are_always_asked_for() -> None:
    run = Run(DraftPause(RankTimes()))
    run.go(100, 32)
    assert run.asked == [32] * 100
    doubtful = Run(DraftPause(measured()))
    doubtful.until(lambda: doubtful.pause.is_paused, 32)
    doubtful.pause.times.curve = None
    doubtful.go(1, 32)
    assert not doubtful.pause.is_paused and doubtful.asked[-1] == 32


def test_another_drafter_ends_the_pause() -> None:
    run = Run(DraftPause(measured()))
    run.go(PROBE_EVERY + 10, 32)
    run.pause.restart()
    run.go(1, 32)
    assert run.asked[-1] == 32
    run.until(lambda: run.pause.is_paused, 32)


def test_what_is_remembered_is_bounded() -> None:
    for count in (1, 5, 32, 300):
        pause = DraftPause(measured())
        for step in range(300):
            pause.note(step, blocks(count))
            kept = sum(len(rows) for _, rows in pause._seen)
            assert kept <= 4 * KEPT_ROWS
        assert sum(len(rows) for step, rows in pause._seen if step < 298) >= KEPT_ROWS / 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", NeverDraft),
        ("lagged", DraftPause),
        ("static_length", type(None)),
        ("static_threshold", type(None)),
        ("algorithm1", type(None)),
    ],
)
def test_only_the_lagged_policy_chooses_and_none_never_drafts(name: PolicyName, kind: type) -> None:
    assert isinstance(LocalPolicy(name).drafting, kind)


def test_never_is_never() -> None:
    never = NeverDraft()
    never.note(0, blocks(3))
    never.restart()
    assert not never.choose(facts(3)).asks.any()
