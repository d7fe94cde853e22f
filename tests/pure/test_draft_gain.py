"""What drafting brings, compared with plain decoding, and what its time is learned from."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.draft_pause import CHECK_EVERY, MARGIN, PROBE_EVERY, DraftPause, drafting_gain
from actors.core.sps import draft_times_at
from tests.pure.draft_load import Run, blocks, facts, measured

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


# --- the time of drafting ---------------------------------------------------------------------------------------------


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


def test_the_step_and_the_wait_before_it_are_corrected_apart() -> None:
    times = measured(draft_s=0.02)
    for _ in range(100):
        times.fold(32, 32, 0, 6.0, 1.28, 32)
    # Measured: 4 s and 0.64 s.
    assert float(times.round_time_s_at(32, 0)) == pytest.approx(6.0, rel=0.05)
    assert float(times.round_time_s_at(32, 32)) == pytest.approx(7.28, rel=0.05)
    assert float(times.round_time_s_at(32, 16)) == pytest.approx(6.64, rel=0.05)


def test_steps_without_blocks_say_nothing_of_drafting() -> None:
    times = measured()
    for wait_s in (0.0, 0.25):
        for _ in range(50):
            times.fold(32, 32, 0, 4.0, wait_s, 0)
    assert float(times.round_time_s_at(32, 32)) == pytest.approx(4.64, rel=0.01)


def test_blocks_that_are_there_at_once_are_cheap() -> None:
    times = measured()
    for _ in range(100):
        times.fold(32, 32, 0, 4.0, 0.0, 32)
    assert float(times.round_time_s_at(32, 32)) < 4.1


def test_a_whole_round_corrects_both_of_its_parts_alike() -> None:
    times = measured()
    for _ in range(100):
        times.fold(32, 32, 0, 2 * 4.64)
    assert float(times.step_time_s_at(32, 32)) == pytest.approx(2 * 4.64, rel=0.05)
    assert float(times.round_time_s_at(32, 0)) == pytest.approx(8.0, rel=0.05)


def test_a_drafter_that_was_slow_for_a_while_is_drafting_again_within_a_bound() -> None:
    """The whole batch is not drafted for in a pause: what a few rows cost must be enough to find out."""
    run = Run(DraftPause(measured(0.01, token_s=0.02)), confidence=0.6)
    run.waits = lambda count: 0.01 * count
    run.go(100, 16)
    assert not run.pause.is_paused
    run.waits = lambda count: 0.5 * count
    run.until(lambda: run.pause.is_paused, 16)
    run.go(200, 16)
    run.waits = lambda count: 0.01 * count
    assert run.until(lambda: not run.pause.is_paused, 16, 2000) <= 30 * PROBE_EVERY
    run.go(200, 16)
    assert not run.pause.is_paused


def test_drafting_for_more_than_was_measured_goes_on_as_the_last_segment_did() -> None:
    at = np.array([1, 2, 16, 32])
    assert draft_times_at(at, (1, 4, 16), (1.0, 1.0, 1.6)) == pytest.approx([1.0, 1.0, 1.6, 2.4])
    assert draft_times_at(at, (1, 16), (2.0, 1.0))[-1] == pytest.approx(1.0)
    assert draft_times_at(at, (1,), (2.0,)).tolist() == [2.0] * 4
