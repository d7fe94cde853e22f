"""Position-keyed random numbers: a function of key, position and purpose, uniform, and uncorrelated."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_DRAFT,
    PURPOSE_SAMPLE,
    RULE_COUPLED,
    RULE_GREEDY,
    RULE_REJECTION,
    SamplingBatch,
    SamplingParams,
    gumbel_noise,
    row_hash,
    token_uniforms,
    uniform,
)

KEYS = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)


def chi_square(samples: np.ndarray, num_bins: int = 64) -> float:
    """Standard deviations by which binned counts differ from uniform ones."""
    counts = np.bincount((samples.ravel() * num_bins).astype(int), minlength=num_bins)
    expected = samples.size / num_bins
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1)))


def test_the_rule_follows_from_temperature_and_seed() -> None:
    assert SamplingParams(temperature=0.0, seed=3).rule == RULE_GREEDY
    assert SamplingParams(temperature=0.5).rule == RULE_REJECTION
    assert SamplingParams(temperature=0.5, seed=3).rule == RULE_COUPLED


def test_a_batch_takes_negative_and_large_keys_and_can_be_cut_to_rows() -> None:
    batch = SamplingBatch.of([SamplingParams(noise_key=key) for key in (-1, 5, 2**64 - 1)])
    assert batch.noise_key.tolist() == [2**64 - 1, 5, 2**64 - 1]
    assert batch.rows([1]).noise_key.tolist() == [5]


def test_draws_depend_on_key_position_and_purpose_alone() -> None:
    whole = uniform(KEYS[:, None], np.arange(10), PURPOSE_ACCEPT)
    assert uniform(KEYS[2:3], [7], PURPOSE_ACCEPT)[0] == whole[2, 7]
    assert uniform(KEYS[2:3], [7], PURPOSE_SAMPLE)[0] != whole[2, 7]


def test_draws_lie_strictly_inside_the_unit_interval_and_below_their_own_total() -> None:
    draws = uniform(np.arange(20_000, dtype=np.uint64), 3, PURPOSE_SAMPLE)
    assert draws.min() > 0 and draws.max() < 1
    largest = (2.0**48 - 0.5) * 2.0**-48  # what the widest draw would be
    assert largest * 0.3 < 0.3


def test_no_two_draws_of_a_stream_share_their_bits() -> None:
    purposes = np.array([0, PURPOSE_ACCEPT, PURPOSE_SAMPLE, *(PURPOSE_DRAFT + np.arange(32))])
    bits = row_hash(KEYS[:, None, None], np.arange(500)[:, None], purposes)
    assert len(np.unique(bits)) == bits.size


@pytest.mark.parametrize("stride", [1, 2, 256, 2**32])
def test_neighbouring_keys_and_positions_give_uniform_and_uncorrelated_draws(stride: int) -> None:
    keys = (np.arange(300) * stride).astype(np.uint64)
    draws = uniform(keys[:, None], np.arange(300), PURPOSE_ACCEPT)
    assert abs(chi_square(draws)) < 5
    for a, b in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    other = uniform(keys[:, None], np.arange(300), PURPOSE_SAMPLE)
    assert abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(draws.size)


def test_one_flipped_bit_of_key_or_position_changes_half_of_the_bits() -> None:
    rng = np.random.default_rng(0)
    keys, positions = rng.integers(0, 2**63, 2000).astype(np.uint64), rng.integers(0, 2**20, 2000)
    base = row_hash(keys, positions, PURPOSE_ACCEPT)

    def share_flipped(other: np.ndarray) -> float:
        return float(np.unpackbits((base ^ other).view(np.uint8)).mean())

    for bit in range(64):
        flipped = row_hash(keys ^ np.uint64(1 << bit), positions, PURPOSE_ACCEPT)
        assert share_flipped(flipped) == pytest.approx(0.5, abs=0.01)
    for bit in range(20):
        assert share_flipped(row_hash(keys, positions ^ (1 << bit), 1)) == pytest.approx(
            0.5, abs=0.01
        )


def test_token_uniforms_are_uniform_across_tokens_and_across_rows() -> None:
    keys = np.arange(64, dtype=np.uint64)
    draws = token_uniforms(keys, np.full(64, 9), np.arange(8192, dtype=np.int32))
    assert abs(chi_square(draws)) < 5
    assert np.abs([chi_square(row) for row in draws]).max() < 6
    assert np.abs([chi_square(column) for column in draws.T[:200]]).max() < 6
    for lag in (1, 2, 64, 4096):
        a, b = draws[:, lag:].ravel(), draws[:, :-lag].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size)
    assert abs(np.corrcoef(draws[1:].ravel(), draws[:-1].ravel())[0, 1]) < 5 / np.sqrt(draws.size)


def test_token_pairs_are_jointly_uniform_over_positions() -> None:
    """Two tokens compete in every race, so their noise must be independent, pair by pair."""
    positions = np.arange(40_000)
    keys = np.zeros(len(positions), np.uint64)
    for pair in ((0, 1), (1, 2), (0, 49151), (1000, 1256), (2**15, 2**16)):
        draws = token_uniforms(keys, positions, np.array(pair, np.int32))
        cell = (draws * 16).astype(int)
        joint = (cell[:, 0] * 16 + cell[:, 1] + 0.5) / 256
        assert abs(chi_square(joint, 256)) < 5


def test_small_uniforms_are_fine_grained_because_they_win_races() -> None:
    draws = token_uniforms(
        np.arange(400, dtype=np.uint64), np.zeros(400, int), np.arange(4096, dtype=np.int32)
    )
    small = draws[draws < 2.0**-10]
    assert len(np.unique(small)) > 0.99 * len(small)
    assert abs(chi_square(small * 2.0**10)) < 5


def test_gumbel_noise_has_the_mean_and_spread_of_a_gumbel() -> None:
    noise = gumbel_noise(KEYS, np.arange(4), np.arange(50_000, dtype=np.int32))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.05)
