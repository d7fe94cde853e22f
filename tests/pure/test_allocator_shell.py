"""The allocator's shell without Ray: who it still listens to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.allocator import AllocatorActor, _solver
from actors.core.messages import Endpoint, RankProfile, StepReport
from actors.link import Membership, ZmqLink
from actors.peers import Peers, Seat
from configs.change import PolicyOrder
from configs.policy import PolicyConfig
from configs.schema import ClusterConfig

MEMBERSHIP = Membership.create()
GAMMA = 5


@pytest.fixture
def shell() -> Iterator[Any]:
    shell = AllocatorActor(Seat("allocator", MEMBERSHIP, "127.0.0.1"), ClusterConfig())
    yield shell
    asyncio.run(shell.stop())


@pytest.fixture
def link() -> Iterator[ZmqLink]:
    link = ZmqLink("target-0", "target", MEMBERSHIP, "127.0.0.1")
    yield link
    link.close()


def profile(rank: Endpoint) -> RankProfile:
    sizes = np.array([1, 8, 64], np.int32)
    times = np.array([0.01, 0.012, 0.03])
    return RankProfile(rank, "here", sizes, sizes, times, np.full(3, 0.004), GAMMA)


def report(rank: Endpoint, step: int) -> StepReport:
    none = np.zeros(GAMMA, np.int64)
    survivals = np.full((2, GAMMA), 0.9, np.float32)
    return StepReport(
        rank, step, 0.01, 0.0, 2, 0, 4, 20, survivals, none, none, none, 2, 9, 10, 0, "cold", 0
    )


def until(
    shell: Any, is_there: Callable[[dict[str, Any]], bool], *links: ZmqLink
) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while True:
        for link in links:
            link.poll(0.02)
        stats: dict[str, Any] = asyncio.run(shell.stats())
        if is_there(stats):
            return stats
        assert time.monotonic() < deadline, stats


def until_counted(shell: Any, link: ZmqLink, **expected: int) -> dict[str, Any]:
    return until(shell, lambda stats: all(stats[n] >= c for n, c in expected.items()), link)


def test_a_rank_that_was_too_busy_to_answer_the_supervisor_gets_budgets_again(
    shell: Any, link: ZmqLink
) -> None:
    rank = link.endpoint
    deadline = time.monotonic() + 10
    while asyncio.run(shell.describe()).phase != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    allocator = asyncio.run(shell.describe()).endpoint
    asyncio.run(shell.connect(Peers(version=1, ranks=(rank,))))
    for message in (profile(rank), report(rank, 1)):
        link.send(allocator, message)
    until_counted(shell, link, num_budgets=1)
    asyncio.run(shell.connect(Peers(version=2)))
    link.send(allocator, report(rank, 2))
    assert until_counted(shell, link, num_stale_reports=1)["ranks"] == []
    asyncio.run(shell.connect(Peers(version=3, ranks=(rank,))))
    link.send(allocator, report(rank, 3))
    assert until_counted(shell, link, num_budgets=2)["ranks"] == ["target-0"]


def test_another_incarnation_starts_without_the_curve_of_the_last(
    shell: Any, link: ZmqLink
) -> None:
    rank, reborn = link.endpoint, replace(link.endpoint, epoch="later")
    asyncio.run(shell.connect(Peers(version=1, ranks=(rank,))))
    allocator = asyncio.run(shell.describe()).endpoint
    for message in (profile(rank), report(rank, 1)):
        link.send(allocator, message)
    until_counted(shell, link, num_budgets=1)
    asyncio.run(shell.connect(Peers(version=2)))
    asyncio.run(shell.connect(Peers(version=3, ranks=(reborn,))))
    link.send(allocator, report(rank, 9))
    link.send(allocator, report(reborn, 1))
    stats = until_counted(shell, link, num_stale_reports=1)
    assert stats["num_budgets"] == 1


def test_budgets_end_with_the_policy_that_made_them(shell: Any, link: ZmqLink) -> None:
    rank = link.endpoint
    order = PolicyOrder(9, PolicyConfig(name="static_length"))
    asyncio.run(shell.connect(Peers(version=1, ranks=(rank,), order=order)))
    allocator = asyncio.run(shell.describe()).endpoint
    for message in (profile(rank), report(rank, 1)):
        link.send(allocator, message)
    stats = until(shell, lambda stats: stats["ranks"] == ["target-0"], link)
    assert (stats["policy"], stats["num_budgets"]) == ("static_length", 0)
    again = PolicyOrder(10, PolicyConfig(name="lagged"))
    asyncio.run(shell.connect(Peers(version=2, ranks=(rank,), order=again)))
    link.send(allocator, report(rank, 2))
    until_counted(shell, link, num_budgets=1)
    _, records = asyncio.run(shell.budgets())
    assert {record.budget.policy_number for record in records} == {10}


@pytest.fixture
def two_links() -> Iterator[list[ZmqLink]]:
    links = [ZmqLink(f"target-{i}", "target", MEMBERSHIP, "127.0.0.1") for i in range(2)]
    yield links
    for link in links:
        link.close()


@pytest.fixture
def joint_shell() -> Iterator[Any]:
    classes = ({"name": "gold", "weight": 4.0}, {"name": "bulk"})
    config = ClusterConfig.model_validate(
        {"target": {"num_ranks": 2}, "policy": {"name": "joint", "classes": classes}}
    )
    shell = AllocatorActor(Seat("allocator", MEMBERSHIP, "127.0.0.1"), config)
    yield shell
    asyncio.run(shell.stop())


def test_joint_budgets_are_served_and_explained(joint_shell: Any, two_links: list[ZmqLink]) -> None:
    """Two ranks of one group: the stats say whose budget is what, under which rule, and how far predictions are off."""
    ranks = tuple(link.endpoint for link in two_links)
    asyncio.run(joint_shell.connect(Peers(version=1, ranks=ranks)))
    allocator = asyncio.run(joint_shell.describe()).endpoint
    for link, rank in zip(two_links, ranks, strict=True):
        for message in (profile(rank), report(rank, 1)):
            link.send(allocator, message)
    stats = until(joint_shell, lambda stats: len(stats["budgets"]) == 2, *two_links)
    assert stats["num_fallbacks"] == 0 and sum(stats["num_by_rule"].values()) >= 2
    for budget in stats["budgets"].values():
        assert budget["class_weights"] == (1.0, 0.25)
        assert budget["max_draft_tokens"] > 0 and budget["rule"] in ("joint", "uniform")
    assert all(error is not None for error in stats["prediction_error"].values())
    assert stats["unmet_classes"] == []
    epoch, records = asyncio.run(joint_shell.budgets())
    assert epoch == allocator.epoch
    assert {record.budget.rank for record in records} == {"target-0", "target-1"}


def test_groups_are_cut_from_the_ranks_in_their_order() -> None:
    sizes = {0: [4], 1: [1] * 4, 2: [2, 2]}
    for size, expected in sizes.items():
        config = ClusterConfig.model_validate(
            {"target": {"num_ranks": 4}, "policy": {"name": "joint", "group_size": size}}
        )
        solver: Any = _solver(config, None)
        groups = {group.ranks for group in solver._groups.values()}
        assert sorted(groups) == [
            config.target.rank_names[first : first + expected[0]]
            for first in range(0, 4, expected[0])
        ]


def test_ranks_that_share_experts_are_a_group_of_the_solver() -> None:
    config = ClusterConfig.model_validate(
        {"target": {"num_ranks": 4, "group_size": 2}, "policy": {"name": "joint"}}
    )
    solver: Any = _solver(config, None)
    groups = sorted({group.ranks for group in solver._groups.values()})
    assert groups == [("target-0", "target-1"), ("target-2", "target-3")]
