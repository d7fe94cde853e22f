"""Rounds over known text: expectations against enumeration, and greedy decoding as the special case."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from actors.engine.training.replay import (
    Acceptance,
    Blocks,
    above_threshold,
    pooled,
    visit_probabilities,
)


def blocks(runs: list[int], gamma: int = 3) -> Blocks:
    hits = np.array([[k < n for k in range(gamma)] for n in runs])
    logits = np.zeros(hits.shape, np.float32)
    return Blocks(hits.astype(float), hits, np.ones_like(hits), logits)


def uncertain(accept: np.ndarray) -> Blocks:
    shape = accept.shape
    whole = np.ones(shape, bool)
    return Blocks(accept, np.zeros(shape, bool), whole, np.zeros(shape, np.float32))


def test_rounds_are_counted_as_greedy_decoding_makes_them() -> None:
    tally = Acceptance(3)
    # Anchors 0..5: accept 2 (+1 bonus) at 0, 0 (+1) at 3, then 2 of 2 left at 4 without a bonus.
    tally.add(blocks([2, 0, 0, 0, 2, 0]))
    assert (tally.committed, tally.rounds) == (6, 3)
    assert tally.accepted_at.tolist() == [2, 2, 0]
    assert tally.survival.tolist() == pytest.approx([2 / 3, 2 / 3, 0])
    assert tally.conditional.tolist() == pytest.approx([2 / 3, 1, 0])


def test_fewer_draft_tokens_need_more_rounds() -> None:
    tally = Acceptance(1)
    tally.add(blocks([3, 3, 3, 3, 3, 2, 1, 0]))
    assert (tally.committed, tally.rounds) == (8, 4)


def test_expected_rounds_are_the_mean_over_every_way_through_the_text() -> None:
    rng = np.random.default_rng(0)
    accept = rng.random((4, 2))
    rounds, at_slot = 0.0, np.zeros(2)
    for outcome in product((False, True), repeat=accept.size):
        hits = np.array(outcome).reshape(accept.shape)
        chance = np.where(hits, accept, 1 - accept).prod()
        at = 0
        while at < len(hits):
            run = int(np.logical_and.accumulate(hits[at]).sum())
            rounds += chance
            at_slot += chance * (np.arange(2) < run)
            at += run + 1
    tally = Acceptance(2)
    tally.add(uncertain(accept))
    assert tally.rounds == pytest.approx(rounds)
    assert tally.accepted_at == pytest.approx(at_slot)


def test_visits_follow_from_where_rounds_end() -> None:
    survival = np.array([[0.5, 0.25], [0.0, 0.0], [1.0, 1.0]])
    # From 0: none accepted (0.5) leads to 1, one (0.25) to 2, two (0.25) beyond; from 1 always to 2.
    assert visit_probabilities(survival).tolist() == [1.0, 0.5, 0.75]


def test_calibration_sees_whole_rounds_that_decoding_makes() -> None:
    answer = blocks([2, 0, 0, 0, 2, 0, 0])
    answer.inside[-2:, 1:] = False  # the text ends inside the last blocks
    answer.confidence_logits[:] = np.arange(7)[:, None]
    logits, accepted = pooled([answer])
    assert logits[:, 0].tolist() == [0, 3, 4]  # 0 accepts two, then 3, then 4
    assert accepted.tolist() == [2, 0, 2]


def test_blocks_beyond_the_text_count_for_the_length_but_not_for_the_survival() -> None:
    answer = blocks([3, 3, 3, 3, 0])
    answer.inside[-1, 1:] = False
    tally = Acceptance(3)
    tally.add(answer)
    assert (tally.rounds, tally.whole_rounds) == (2, 1)
    assert tally.survival.tolist() == [1, 1, 1]


def test_a_threshold_cuts_at_the_first_doubtful_slot() -> None:
    answer = blocks([3, 3, 3, 3, 3, 3, 3, 3])
    sure = np.tile([0.9, 0.4, 0.9], (8, 1))
    everything = above_threshold([answer], [sure], 0.0)
    assert (everything.length, everything.verified) == (4.0, 4.0)
    cut = above_threshold(
        [answer], [sure], 0.5
    )  # one slot is kept, whatever comes behind the second
    assert (cut.length, cut.verified) == (2.0, 2.0)
