"""Confidences without a confidence head: which round teaches what, through the engines that use them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.acceptance_estimate import PRIOR
from actors.core.messages import CommitBatch
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.base import DrafterEngine
from actors.engine.drafters.confidence import NUM_PEAK_BINS, OnlineConfidence, peak_bins
from actors.engine.drafters.pair_engine import PairEngine
from actors.engine.drafters.pairs import PairModel
from tests.torch_cpu.tiny_drafters import (
    DFLASH,
    Stream,
    commit_batch,
    eagle3_config,
    pair_engine,
    random_model,
    tiny_config,
    tiny_engine,
    tiny_model,
)

GAMMA = 3


def commits(
    stream: Stream, first: int, committed: int, verified: int = 0, generation: int = 0
) -> CommitBatch:
    return commit_batch([stream.commit(first, committed, verified)], generation=generation)


def learned(rounds: list[tuple[int, int, int]], generation: int = 0) -> np.ndarray:
    """[GAMMA] tokens that count after the (first, committed, verified) commits behind a block for length 10."""
    online, stream = OnlineConfidence(GAMMA), Stream("a", 40, tiny_config())
    only = np.array([0])
    online.propose(commits(stream, 0, 10), only, np.zeros((1, GAMMA), np.int64))
    for first, committed, verified in rounds:
        online.learn(commits(stream, first, committed, verified, generation), only)
    return online.estimate.num_reached


def test_the_commit_behind_a_block_teaches_what_was_scheduled_and_reached() -> None:
    assert learned([(9, 12, 3)]).tolist() == [1, 1, 0]  # one of three accepted
    assert learned([(9, 13, 2)]).tolist() == [1, 1, 0]  # both scheduled ones accepted
    assert learned([(9, 11, 0)]).tolist() == [0, 0, 0]  # the block came too late


def test_a_block_teaches_once_and_only_for_its_own_round() -> None:
    assert learned([(9, 12, 3), (9, 12, 3)]).tolist() == [1, 1, 0]
    assert learned([(11, 13, 3)]).tolist() == [0, 0, 0]  # a round in between was lost
    assert learned([(9, 12, 3)], generation=1).tolist() == [0, 0, 0]


def test_closing_forgets_blocks_that_are_out() -> None:
    online, stream = OnlineConfidence(GAMMA), Stream("a", 40, tiny_config())
    online.propose(commits(stream, 0, 10), np.array([0]), np.zeros((1, GAMMA), np.int64))
    online.close(("a", "never-seen"))
    online.learn(commits(stream, 9, 12, 3), np.array([0]))
    assert online.estimate.num_reached.sum() == 0


def test_peaks_fall_into_bins_of_equal_width() -> None:
    assert peak_bins(np.array([[0.0, 0.09, 0.1, 0.99, 1.0]])).tolist() == [[0, 0, 1, 9, 9]]
    assert peak_bins(np.ones(1)).max() < NUM_PEAK_BINS


def dflash_engine() -> DrafterEngine:
    return tiny_engine(tiny_model(tiny_config(**DFLASH)), gamma=GAMMA)


def eagle3_engine() -> PairEngine:
    model = random_model(eagle3_config())
    assert isinstance(model, PairModel)
    return pair_engine(model, gamma=GAMMA)


@pytest.mark.parametrize("make", [dflash_engine, eagle3_engine])
def test_engines_start_cold_and_follow_what_is_accepted(make: object) -> None:
    for accepted, well in ((GAMMA, True), (0, False)):
        engine = make()  # type: ignore[operator]
        stream = Stream("a", 400, tiny_config())
        if engine.spec.feature_dim != stream.features.shape[1]:
            stream.features = stream.features[:, : engine.spec.feature_dim]
        proposal = engine.advance(commits(stream, 0, 10))
        assert (proposal.confidences == PRIOR).all()
        committed = 10
        for _ in range(60):
            batch = commits(stream, committed - 1, committed + accepted + 1, GAMMA)
            committed += accepted + 1
            proposal = engine.advance(replace(batch))
        assert (proposal.confidences[0, 0] > 0.8) == well
        assert (proposal.confidences[0, 0] < 0.4) == (not well)


def test_a_confidence_does_not_depend_on_the_token_it_judges() -> None:
    """Two draws of the same block agree in every confidence up to the first token that differs (C3)."""
    engine, rng = eagle3_engine(), np.random.default_rng(0)
    bins = rng.integers(0, NUM_PEAK_BINS, (600, GAMMA))
    well = np.where(bins[:, 0] > NUM_PEAK_BINS // 2, GAMMA, rng.integers(0, 2, 600))
    engine.online.estimate.observe(bins, np.full(600, GAMMA), well)
    stream = Stream("a", 40, tiny_config())
    found = []
    for key in range(6):
        engine.close(("a",))
        params = SamplingBatch.of([SamplingParams(temperature=3.0, noise_key=key)])
        proposal = engine.advance(replace(commits(stream, 0, 10), sampling=params))
        assert proposal is not None
        found.append((proposal.draft_token_ids[0], proposal.confidences[0]))
    for tokens, confidences in found:
        for others, theirs in found:
            same = int(np.logical_and.accumulate(tokens == others).sum())
            assert confidences[: same + 1].tolist() == theirs[: same + 1].tolist()
    assert len({tuple(confidences) for _, confidences in found}) > 1
