"""Samples of steps: medians become the curve, contexts become what a context token costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.step_samples import StepSamples

RNG = np.random.default_rng(3)


def samples(
    tokens: list[int], requests: list[int], context: list[int], times: np.ndarray, at: int = 256
) -> StepSamples:
    return StepSamples(np.array(tokens), np.array(requests), np.array(context), times, at)


def test_the_curve_holds_the_medians_of_its_context_in_order() -> None:
    times = np.array([[3.0, 9.0, 4.0], [1.0, 1.0, 5.0], [7.0, 7.0, 7.0], [2.0, 2.5, 2.25]])
    tokens, requests, seconds, shared = samples(
        [8, 2, 2, 8], [4, 2, 2, 2], [256, 256, 32, 256], times
    ).curve()
    assert tokens.tolist() == [2, 8, 8]
    assert requests.tolist() == [2, 2, 4]
    assert seconds.tolist() == [1.0, 2.25, 4.0]
    assert shared is None


def test_what_a_group_did_together_is_a_part_of_every_point() -> None:
    times = np.array([[3.0, 9.0, 4.0], [1.0, 1.0, 5.0]])
    found = replace(samples([8, 2], [4, 2], [256, 256], times), shared_s=times / 4)
    shared = found.curve().shared_time_s
    assert shared is not None and shared.tolist() == [0.25, 1.0]
    with pytest.raises(ValueError, match="measure again"):
        replace(found, shared_s=times[:1])


def test_what_a_context_token_costs_is_told_apart_from_what_the_step_costs() -> None:
    grid = [(r, q, c) for r in (1, 4, 8) for q in (1, 6) for c in (32, 256, 1024)]
    base = {(r, q): float(RNG.uniform(1, 3)) for r, q, _ in grid}
    median = np.array([base[r, q] + 2e-5 * r * c for r, q, c in grid])
    times = median[:, None] * np.array([0.99, 1.0, 1.01])
    found = samples(
        [r * q for r, q, _ in grid], [r for r, _, _ in grid], [c for _, _, c in grid], times
    )
    assert found.has_contexts
    assert found.context_cost_s() == pytest.approx(2e-5)
    assert found.spread == pytest.approx(0.005, rel=0.1)


def test_one_context_says_nothing_of_context_and_noise_never_makes_it_negative() -> None:
    one = samples([1, 4], [1, 2], [256, 256], np.array([[1.0], [2.0]]))
    assert not one.has_contexts and one.context_cost_s() == 0.0
    falling = samples([1, 1], [1, 1], [32, 256], np.array([[2.0], [1.0]]))
    assert falling.context_cost_s() == 0.0


@pytest.mark.parametrize(
    "times", [np.zeros((2, 0)), np.zeros((1, 3)), np.zeros(2)], ids=["empty", "short", "flat"]
)
def test_samples_that_do_not_fit_together_are_refused(times: np.ndarray) -> None:
    with pytest.raises(ValueError, match="measure again"):
        samples([1, 2], [1, 1], [32, 32], times)
