"""Whatever the ranks of a group do at the same time, nobody waits for ever and every text is what it is alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.core.lockstep import StepLayout
from tests.torch_cpu.group_cluster import GroupCluster, group_config, until
from tests.torch_cpu.group_streams import (
    GREEDY,
    STATES,
    STREAMS,
    by_request,
    check_states,
    output,
)

Texts = dict[str, list[int]]


@pytest.fixture(scope="module")
def pair(group_model: Path, group_texts: Texts) -> Iterator[GroupCluster]:
    # Noise in one rank's confidences: were they to shape anything shared, the ranks would part.
    config = group_config(group_model, 2, policy="lagged")
    with GroupCluster(config, by_request(group_texts), jitter=1e-4) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("number", "states"),
    [
        pytest.param(number, states, id=" beside ".join(states))
        for number, states in enumerate(itertools.product(STATES, STATES))
    ],
)
def test_a_group_goes_on_whatever_two_ranks_do(
    pair: GroupCluster, group_texts: Texts, number: int, states: tuple[str, str]
) -> None:
    check_states(pair, group_texts, states, number)


@pytest.fixture(scope="module")
def four(group_model: Path, group_texts: Texts) -> Iterator[GroupCluster]:
    config = group_config(group_model, 4, "all_to_all", policy="lagged")
    with GroupCluster(config, by_request(group_texts), jitter=1e-4) as cluster:
        yield cluster


def rows_of_four() -> list[tuple[str, ...]]:
    """Any two ranks meet in every pair of states: rank r is in state a + r * b, over all a and b modulo seven."""
    count = range(len(STATES))
    return [
        tuple(STATES[(a + rank * b) % len(STATES)] for rank in range(4))
        for a, b in itertools.product(count, count)
    ]


def test_the_states_of_four_ranks_cover_every_pair_of_every_two() -> None:
    rows = rows_of_four()
    for one, other in itertools.permutations(range(4), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(STATES, STATES))


@pytest.mark.parametrize(
    ("number", "states"),
    [pytest.param(n, states, id="-".join(states)) for n, states in enumerate(rows_of_four())],
)
def test_a_group_goes_on_whatever_four_ranks_do(
    four: GroupCluster, group_texts: Texts, number: int, states: tuple[str, ...]
) -> None:
    check_states(four, group_texts, states, number)


def test_confidences_that_differ_on_one_rank_change_no_layout_of_the_group(
    group_model: Path, group_texts: Texts
) -> None:
    """What a rank schedules is its own affair; what the group computes is the same on both, whoever believes what."""
    config = group_config(group_model, 2, policy="lagged")
    with GroupCluster(config, by_request(group_texts), jitter=1.0) as cluster:
        for rank in (0, 1):
            cluster.submit(f"decode.{500 + rank}", rank, *STREAMS["decode"], GREEDY)
        cluster.finish("decode.500", "decode.501")
        for rank in (0, 1):
            assert cluster.tokens(f"decode.{500 + rank}") == output(group_texts, "decode")
        agreed = cluster.agreed()  # asserts that both ranks hold the same layouts
        assert [layout.step for layout in agreed] == list(range(len(agreed)))
        assert any(0 in layout.num_tokens and layout.runs for layout in agreed)


def test_an_idle_rank_that_skips_the_vote_is_found_within_the_bound(oracle_models: Path) -> None:
    """The fault that the tests above would find: a rank without work that does not come."""
    bound_s = 2.0
    config = group_config(oracle_models / "mixtral", 2, policy="none", bound_s=bound_s)
    with GroupCluster(config, {}) as cluster:
        idle = StepLayout(0, (0, 0), (), False, 0, 0)
        cluster.ranks[1]._engine.join = lambda **_: idle
        cluster.submit("decode.0", 0, *STREAMS["decode"], GREEDY)
        with pytest.raises(AssertionError, match=r"did not complete within 2 s"):
            until(cluster.poll, within_s=10 * bound_s)
        assert cluster.reason("decode.0") is None  # it goes on elsewhere
