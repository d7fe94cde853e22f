"""Ranks of a group under Ray: they step together, end together, and are put together again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster import launch as launcher
from tests import ray_fakes
from tests.ray_fakes import stream_after
from tests.ray_local.conftest import FAKE_PARTS, Cluster, small_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [5, 6, 7]
BOUND_S = 4.0
BACK_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[Cluster]:
    launcher.shutdown()
    config = small_config(2, 1)
    target = config.target.model_copy(update={"group_size": 2, "collective_timeout_s": BOUND_S})
    config = config.model_copy(update={"target": target})
    launcher.launch(config, parts=replace(FAKE_PARTS, target_engine=ray_fakes.FakeGroupTarget))
    yield Cluster(config)
    launcher.shutdown()


def states(cluster: Cluster) -> list[str]:
    return [route.state for route in cluster.routing().ranks]


def epochs(cluster: Cluster) -> list[str]:
    return [route.endpoint.epoch for route in cluster.routing().ranks]


def until_formed_anew(cluster: Cluster, before: list[str]) -> None:
    def is_back() -> bool:
        now = epochs(cluster)
        return states(cluster) == ["ready", "ready"] and not set(now) & set(before)

    cluster.until(is_back, BACK_WITHIN_S)


def test_ranks_of_a_group_step_together_with_work_and_without(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("alone", PROMPT, 300, rank=1)
    client.finish("alone")
    for i in range(6):
        client.submit(f"r{i}", [i, 2, 3], 120 + 40 * i, rank=i % 2)
    client.finish(*(f"r{i}" for i in range(6)))
    assert client.tokens("alone") == stream_after(PROMPT, 300)
    for i in range(6):
        assert client.tokens(f"r{i}") == stream_after([i, 2, 3], 120 + 40 * i)
    first, second = (cluster.stats()[f"target-{i}"]["group"] for i in range(2))
    assert (first["rank"], second["rank"], first["size"]) == (0, 1, 2)
    assert first["epoch"] == second["epoch"]
    assert first["num_steps"] > 0 and first["most_imbalance"] > 1


def test_a_killed_rank_takes_its_group_along_and_all_come_back(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("lost", PROMPT, 1000, rank=0)
    client.until(lambda: len(client.tokens("lost")) > 20)
    before = epochs(cluster)
    cluster.kill("target-1")
    until_formed_anew(cluster, before)
    done = client.tokens("lost")
    client.submit("rest", PROMPT + done, 1000 - len(done), rank=1)
    client.finish("rest")
    assert done + client.tokens("rest") == stream_after(PROMPT, 1000)


@pytest.mark.parametrize("stopped", ["target-1", "target-0"])
def test_a_rank_stopped_inside_a_collective_is_found_and_its_group_formed_anew(
    cluster: Cluster, open_client: Callable[..., Any], stopped: str
) -> None:
    client = open_client(cluster)
    client.submit("running", PROMPT, 1000, rank=0)
    client.until(lambda: len(client.tokens("running")) > 20)
    before = epochs(cluster)
    pid = cluster.status(stopped)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        cluster.until(lambda: "dead" in states(cluster), BACK_WITHIN_S)
        until_formed_anew(cluster, before)
    finally:
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.kill(pid, signal.SIGCONT)
    client.submit("after", PROMPT, 50, rank=1)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 50)


def test_a_group_that_is_told_to_stop_ends_in_order(cluster: Cluster) -> None:
    from ray import get, get_actor, kill

    kill(cluster.supervisor)  # as whoever ends a cluster does: it would start them again
    actors = [get_actor(f"target-{i}", namespace=launcher.NAMESPACE) for i in range(2)]
    get([actor.stop.remote() for actor in actors], timeout=30)
    phases = [get(actor.describe.remote(), timeout=10).phase for actor in actors]
    assert phases == ["stopped", "stopped"]
