"""What the allocator tells whoever decides how many units serve: the time per token now, and with one unit fewer."""

from __future__ import annotations

import pytest

from actors.core.capacity import Allocator
from tests.pure.test_capacity import profile, report

PAIR = ("rank-0", "rank-1")


def allocator(*running: int, waiting: int = 0, most: int = 0) -> Allocator:
    """Of ranks that run so many requests each, one token a request and step, and `most` at once."""
    made = Allocator()
    for number, count in enumerate(running):
        name = f"rank-{number}"
        made.fold(profile(name), 0.0)
        made.fold(
            report(
                1, name, num_requests=count, batch_tokens=count, num_committed=count, num_waiting=waiting,
                max_running=most,
            ),
            0.0,
        )  # fmt: skip
    return made


def test_the_time_now_is_what_the_router_goes_by() -> None:
    made = allocator(4, 12)
    loads = {load.rank: load.predicted_tpot_s for load in made.load_view(0.0).ranks}
    told = made.foretell([("rank-0",), ("rank-1",)])
    assert [count for count, _, _ in told] == [4, 12]
    assert [now for _, now, _ in told] == [loads["rank-0"], loads["rank-1"]]


def test_with_one_unit_fewer_the_rest_carries_all_streams() -> None:
    made = allocator(4, 4)
    (_, now_s, fewer_s), _ = made.foretell([("rank-0",), ("rank-1",)])
    alone = allocator(8)
    ((_, then_s, _),) = alone.foretell([("rank-0",)])
    assert fewer_s == pytest.approx(then_s) and fewer_s > now_s


def test_the_last_unit_has_nobody_to_leave_its_streams_to() -> None:
    ((_, _, fewer_s),) = allocator(4).foretell([("rank-0",)])
    assert fewer_s is None


def test_a_group_counts_as_one_and_is_as_slow_as_its_slowest() -> None:
    made = allocator(2, 30)
    (count, now_s, _), *_ = made.foretell([PAIR])
    slowest = max(load.predicted_tpot_s for load in made.load_view(0.0).ranks)
    assert (count, now_s) == (32, slowest)


def test_streams_that_wait_make_a_token_take_longer() -> None:
    idle, full = (
        allocator(4).foretell([("rank-0",)]),
        allocator(4, waiting=5).foretell([("rank-0",)]),
    )
    assert full[0][0] == 9 and full[0][1] == pytest.approx(2 * idle[0][1])


def test_streams_beyond_the_places_of_a_rank_wait_and_make_a_token_take_longer() -> None:
    roomy, full = allocator(4, 4), allocator(4, 4, most=4)
    units = [("rank-0",), ("rank-1",)]
    (_, roomy_s, roomy_fewer_s), _ = roomy.foretell(units)
    (_, full_s, full_fewer_s), _ = full.foretell(units)
    ((_, three_s, _),) = allocator(3, most=4).foretell([("rank-0",)])
    assert three_s is not None
    assert full_s == pytest.approx(three_s * 5 / 4), "four run, a fifth waits"
    assert full_fewer_s == pytest.approx(three_s * 9 / 4), "four run, five wait"
    assert roomy_s is not None and full_s > roomy_s
    assert roomy_fewer_s is not None and full_fewer_s > roomy_fewer_s


def test_without_a_curve_nothing_is_foretold() -> None:
    made = Allocator()
    made.fold(report(1, "rank-0"), 0.0)
    assert made.foretell([("rank-0",), ("rank-9",)]) == [(3, None, None), (0, None, None)]
