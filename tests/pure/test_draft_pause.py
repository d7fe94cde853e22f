"""Drafting stops where it costs more than it brings, and is always found again when it would pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.draft_pause import (
    CHECK_EVERY,
    KEPT_ROWS,
    LONGEST_PAUSE,
    MARGIN,
    MIN_PAUSE,
    MIN_ROWS,
    PROBE_EVERY,
    DraftPause,
    NeverDraft,
)
from actors.core.local_policy import LocalPolicy, PolicyName
from actors.core.prefix_scheduler import LAG_STEPS
from actors.core.sps import RankTimes
from tests.pure.draft_load import Run, blocks, facts, measured

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


@pytest.mark.parametrize("alone", range(40, 40 + CHECK_EVERY))
def test_a_crowd_that_comes_at_once_is_judged_at_once(alone: int) -> None:
    run = Run(DraftPause(measured()))
    run.go(alone, 1)
    run.go(1, 32)
    assert run.events[-1] == "pause" and run.asked[-1] == 0


def test_most_steps_of_a_crowd_draft_nothing_and_a_probe_is_for_few_rows() -> None:
    run = Run(DraftPause(measured()))
    run.go(1000, 32)
    late = run.asked[20:]
    assert set(late) == {0, MIN_ROWS}
    assert late.count(MIN_ROWS) <= len(late) / PROBE_EVERY + 1
    assert run.events.count("probe") == run.asked.count(MIN_ROWS) >= 4
    assert run.events.count("pause") == 1


def test_probes_that_find_nothing_new_become_rarer_up_to_a_bound() -> None:
    run = Run(DraftPause(measured()))
    run.go(2000, 32)
    gaps = np.diff([step for step, event in enumerate(run.events) if event == "probe"])
    waits = (gaps - LAG_STEPS).tolist()
    assert waits[:3] == [2 * PROBE_EVERY, 4 * PROBE_EVERY, LONGEST_PAUSE]
    assert set(waits[3:]) == {LONGEST_PAUSE}


def test_another_load_makes_probes_frequent_again() -> None:
    run = Run(DraftPause(measured()))
    run.go(1000, 32)
    run.go(400, 24)
    probes = np.flatnonzero([event == "probe" for event in run.events[1000:]])
    assert probes[0] == 0, "the load is another: what was found holds no longer"
    assert (np.diff(probes)[:2] - LAG_STEPS).tolist() == [PROBE_EVERY, 2 * PROBE_EVERY]


def test_a_gain_that_goes_on_rising_is_looked_at_often_and_one_rise_is_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(DraftPause(measured()))
    run.go(1000, 32)
    gains = iter([0.5, 0.6, 0.5, 0.6, 0.7, 0.8, 0.8])
    monkeypatch.setattr("actors.core.draft_pause.drafting_gain", lambda *_: next(gains))
    probes = []
    while len(probes) < 8:
        run.until(lambda: run.events[-1] == "probe", 32)
        probes.append(run.step)
        run.go(1, 32)
    waits = (np.diff(probes) - LAG_STEPS).tolist()
    assert waits[:4] == [LONGEST_PAUSE] * 4
    assert waits[4:6] == [PROBE_EVERY] * 2 and waits[6] == 2 * PROBE_EVERY


def test_a_pause_after_drafting_again_begins_with_the_shortest_wait() -> None:
    run = Run(DraftPause(measured(0.1, token_s=0.02)), confidence=0.02)
    run.go(1000, 12)
    run.confidence = 0.97
    run.until(lambda: not run.pause.is_paused, 12)
    run.confidence = 0.02
    run.until(lambda: run.pause.is_paused, 12)
    paused = run.step
    run.until(lambda: run.events[-1] == "probe", 12)
    assert run.step - paused == PROBE_EVERY


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
    assert steps <= LONGEST_PAUSE + 2 * (probe + LAG_STEPS) + 1
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
    for _ in range(4 * LONGEST_PAUSE):
        choice = run.pause.choose(facts(32, run.step))
        probes += choice.event == "probe"
        run.step += 1
    assert probes >= 4 and run.pause.is_paused
    run.until(lambda: not run.pause.is_paused, 1)


def test_all_rows_take_their_turns_as_probes() -> None:
    pause = DraftPause(measured())
    run = Run(pause)
    run.until(lambda: pause.is_paused, 20)
    seen = np.zeros(20, int)
    for _ in range(2 * LONGEST_PAUSE):
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
    run.go(LONGEST_PAUSE + LAG_STEPS + 1, 32)
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


# --- what else ends or forbids a pause -------------------------------------------------------------------------------


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
