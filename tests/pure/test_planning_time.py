"""Planning a thousand ranks is fast and grows with the ranks only. Processor time, the least of several runs."""

from __future__ import annotations

import pytest

from tests.pure.planning_benchmark import best_seconds

BUDGET_S = 0.020  # 1,024 ranks of 256 requests, gamma 7


@pytest.mark.slow
def test_a_thousand_ranks_are_planned_in_twenty_milliseconds() -> None:
    assert best_seconds(num_ranks=1024, num_requests=256, gamma=7) <= BUDGET_S


@pytest.mark.slow
def test_planning_grows_no_faster_than_the_ranks() -> None:
    small = best_seconds(num_ranks=256, num_requests=256, gamma=7)
    large = best_seconds(num_ranks=1024, num_requests=256, gamma=7)
    assert large <= 1.5 * 4 * small
