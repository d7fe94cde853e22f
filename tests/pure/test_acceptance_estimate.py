"""Acceptance learned from served rounds: what a round teaches, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core import acceptance_estimate
from actors.core.acceptance_estimate import PRIOR, AcceptanceEstimate

GAMMA, BINS = 4, 3


def everywhere(bin_: int, rows: int = 1) -> np.ndarray:
    return np.full((rows, GAMMA), bin_, np.int64)


def test_it_starts_at_the_prior() -> None:
    found = AcceptanceEstimate(GAMMA, BINS).confidences(everywhere(1, 2))
    assert found.dtype == np.float32
    assert found.tolist() == [[PRIOR] * GAMMA] * 2


@pytest.mark.parametrize(
    ("verify_len", "accepted", "reached"),
    [
        (4, 2, [1, 1, 1, 0]),  # two accepted, the third refused, the fourth never reached
        (2, 2, [1, 1, 0, 0]),  # all that was scheduled is accepted: nothing is known beyond
        (3, 0, [1, 0, 0, 0]),
        (0, 0, [0, 0, 0, 0]),  # nothing was scheduled
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_only_scheduled_and_reached_positions_count(
    verify_len: int, accepted: int, reached: list[int]
) -> None:
    estimate = AcceptanceEstimate(GAMMA, BINS)
    estimate.observe(everywhere(0), np.array([verify_len]), np.array([accepted]))
    assert estimate.num_reached.tolist() == reached
    found = estimate.confidences(everywhere(0))[0]
    for k in range(GAMMA):
        if not reached[k]:
            assert found[k] == PRIOR
        else:
            assert (found[k] > PRIOR) == (k < accepted)


def test_it_finds_the_rate_of_every_position_and_bin() -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.5, 0.95, (GAMMA, BINS))
    estimate = AcceptanceEstimate(GAMMA, BINS)
    for _ in range(400):
        bins = rng.integers(0, BINS, (16, GAMMA))
        hits = rng.random((16, GAMMA)) < truth[np.arange(GAMMA), bins]
        verify_len = rng.integers(0, GAMMA + 1, 16)  # a budget cuts where it likes
        accepted = np.minimum(np.logical_and.accumulate(hits, 1).sum(1), verify_len)
        estimate.observe(bins, verify_len, accepted)
    for bin_ in range(BINS):
        found = estimate.confidences(everywhere(bin_))[0]
        np.testing.assert_allclose(found, truth[:, bin_], atol=0.1)


def test_a_bin_never_seen_takes_the_rate_of_its_position() -> None:
    estimate = AcceptanceEstimate(GAMMA, BINS)
    for _ in range(200):
        estimate.observe(everywhere(0), np.array([4]), np.array([4]))
    assert estimate.confidences(everywhere(2))[0, 0] > 0.95


@pytest.fixture
def memory_rounds(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(acceptance_estimate, "MEMORY_ROUNDS", 60.0)
    return 60


def test_a_position_given_up_is_tried_again_in_time(memory_rounds: int) -> None:
    estimate = AcceptanceEstimate(GAMMA, BINS)
    for _ in range(100):
        estimate.observe(everywhere(0), np.array([1]), np.array([0]))
    low = float(estimate.confidences(everywhere(0))[0, 0])
    assert low < 0.1
    for _ in range(8 * memory_rounds):
        estimate.observe(everywhere(0), np.array([0]), np.array([0]))
    assert float(estimate.confidences(everywhere(0))[0, 0]) == pytest.approx(PRIOR, abs=0.05)


def test_it_follows_a_change(memory_rounds: int) -> None:
    estimate = AcceptanceEstimate(GAMMA, BINS)
    for accepted in (4, 0):
        for _ in range(3 * memory_rounds):
            estimate.observe(everywhere(0), np.array([4]), np.array([accepted]))
    assert float(estimate.confidences(everywhere(0))[0, 0]) < 0.1
