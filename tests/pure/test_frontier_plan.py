"""`dspark bench`: who is measured, in which order, with which requests."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.frontier.plan import (
    ALL_POLICIES,
    BRACKET,
    Cell,
    PlanError,
    contenders_of,
    is_fixed,
    quick_policies,
    seconds_left,
    sessions_of,
)
from cluster.frontier.workload import LEAST_REQUESTS, num_requests, requests_of

COUNTS, TEMPERATURES = (1, 4, 16), (0.0, 1.0)


def labels(*names: str, gamma: int = 3, peers: tuple[str, ...] = ()) -> list[str]:
    return [contender.label for contender in contenders_of(names, gamma, peers)]


def test_every_name_stands_for_its_contenders() -> None:
    assert labels(*ALL_POLICIES) == [
        "none", "fixed-1", "fixed-2", "fixed-3", BRACKET, "mtp1", "threshold", "lagged", "joint",
    ]  # fmt: skip
    assert labels("fixed-max", "fixed-3", "lagged", "lagged") == ["fixed-3", "lagged"]
    assert labels(*quick_policies(3)) == ["none", "fixed-1", "fixed-3", BRACKET, "mtp1", "lagged"]
    assert labels(*quick_policies(5), gamma=5)[1:4] == ["fixed-1", "fixed-3", "fixed-5"]
    known = {c.label: c for c in contenders_of(ALL_POLICIES, 3)}
    assert known["fixed-2"].policy == {"name": "static_length", "static_length": 2}
    assert known["mtp1"].cluster == known[BRACKET].cluster == "mtp1"
    assert known["mtp1"].policy["static_length"] == 1
    assert [label for label in known if is_fixed(label)] == [
        "none",
        "fixed-1",
        "fixed-2",
        "fixed-3",
    ]


@pytest.mark.parametrize("name", ["fixed-4", "fixed-0", "fixed-x", "best", "fixedmax"])
def test_an_unknown_contender_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(PlanError, match="--policies"):
        contenders_of([name], 3)


@pytest.mark.parametrize("peer", ["http://here/v1", "vllm=here", "=http://x", "none=http://x/v1"])
def test_a_peer_needs_a_name_of_its_own_and_an_address(peer: str) -> None:
    with pytest.raises(PlanError, match="--endpoint"):
        contenders_of(["none"], 3, [peer])
    (_, found) = contenders_of(["none"], 3, ["llama=http://x/v1/"])
    assert (found.label, found.endpoint, found.is_peer) == ("llama", "http://x/v1", True)


def test_every_cell_is_measured_once_a_repeat_and_everybody_under_a_load_side_by_side() -> None:
    contenders = contenders_of(ALL_POLICIES, 3, ["vllm=http://x/v1"])
    sessions = sessions_of(contenders, COUNTS, TEMPERATURES, 3)
    cells = [cell for session in sessions for cell in session.cells]
    expected = {
        Cell(contender.label, count, temperature, repeat)
        for contender in contenders
        for count in COUNTS
        for temperature in TEMPERATURES
        for repeat in range(3)
    }
    assert set(cells) == expected and len(cells) == len(expected)
    assert len({cell.key for cell in cells}) == len(cells)
    ours = [c for s in sessions if s.cluster == "ours" for c in s.cells]
    num_ours = sum(contender.cluster == "ours" for contender in contenders)
    for start in range(0, len(ours), num_ours):
        side_by_side = ours[start : start + num_ours]
        assert len({(c.concurrency, c.temperature, c.repeat) for c in side_by_side}) == 1
        assert len({cell.label for cell in side_by_side}) == num_ours


def test_over_the_repeats_everybody_comes_early_and_late() -> None:
    contenders = contenders_of(["none", "fixed", "lagged", "joint"], 2)
    places: dict[str, set[int]] = {}
    for session in sessions_of(contenders, [4], [0.0], 5):
        for start in range(0, len(session.cells), len(contenders)):
            for place, cell in enumerate(session.cells[start : start + len(contenders)]):
                places.setdefault(cell.label, set()).add(place)
    assert all(len(seen) == 5 for seen in places.values())


def test_the_clusters_take_turns_by_repeats_with_as_few_starts_as_that_allows() -> None:
    contenders = contenders_of(["none", "lagged", "mtp1"], 2)
    sessions = sessions_of(contenders, [1], [0.0], 3)
    assert [s.cluster for s in sessions] == ["ours", "mtp1", "ours", "mtp1"]
    repeats = [Counter(cell.repeat for cell in s.cells) for s in sessions]
    assert repeats == [{0: 2}, {0: 2, 1: 2}, {1: 2, 2: 2}, {2: 2}]
    alone = sessions_of(contenders_of(["none", "lagged"], 2), [1], [0.0], 3)
    assert [s.cluster for s in alone] == ["ours"]


def test_the_order_is_the_same_for_the_same_seed() -> None:
    contenders = contenders_of(ALL_POLICIES, 3)
    first = sessions_of(contenders, COUNTS, TEMPERATURES, 3, seed=1)
    assert first == sessions_of(contenders, COUNTS, TEMPERATURES, 3, seed=1)
    assert first != sessions_of(contenders, COUNTS, TEMPERATURES, 3, seed=2)


def test_the_time_left_is_foretold_from_the_nearest_load() -> None:
    requests = {1: 8, 4: 12, 64: 192}
    assert seconds_left([], [1], requests) is None
    assert seconds_left([(1, 16.0), (1, 24.0)], [1, 4], requests) == pytest.approx(2.5 * 20)
    assert seconds_left([(1, 8.0), (64, 96.0)], [64, 64], requests) == pytest.approx(192)


def test_a_short_list_of_requests_begins_a_long_one_and_lengths_differ() -> None:
    long = requests_of(200, tokens=64, seed=3)
    assert requests_of(20, tokens=64, seed=3) == long[:20] and requests_of(20, 64, 4) != long[:20]
    assert {one.kind for one in long[:4]} == {"code", "chat", "math", "prose"}
    lengths = [one.max_tokens for one in long]
    assert min(lengths) >= 32 and max(lengths) <= 96 and len(set(lengths)) > 20
    assert len({one.seed for one in long}) == 200 and len({one.prompt for one in long}) > 120
    assert (num_requests(1, 3), num_requests(16, 3)) == (LEAST_REQUESTS, 48)
