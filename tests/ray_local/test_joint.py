"""Joint budgets on a real cluster of scripted engines, and streams that outlive the process of their allocator."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.ray_fakes import stream_after

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CROWD, TOKENS = 8, 900


@pytest.fixture(scope="module")
def cluster(start_cluster: Any, make_config: Any) -> Any:
    return start_cluster(make_config(2, 2, policy={"name": "joint"}))


def test_killing_the_allocator_of_unevenly_loaded_ranks_changes_no_token(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    streams = {f"chat-{i}": ([i, 2, 3], 0) for i in range(CROWD)}
    streams["code"] = ([7, 8, 9], 1)
    for name, (prompt, rank) in streams.items():
        client.submit(name, prompt, TOKENS, rank)
    client.until(lambda: all(len(client.tokens(name)) > 100 for name in streams))
    stats = cluster.stats()
    assert set(stats["allocator"]["budgets"]) == {"target-0", "target-1"}
    # Whether the model is trusted later depends on how evenly this machine runs; it is while it has seen little.
    assert stats["allocator"]["num_by_rule"].keys() & {"joint", "uniform"}
    assert stats["target-0"]["decision_share"] > 0
    pid = cluster.status("allocator")["pid"]
    os.kill(pid, signal.SIGKILL)
    client.finish(*streams, within_s=120)
    for name, (prompt, _) in streams.items():
        assert client.tokens(name) == stream_after(prompt, TOKENS)
    cluster.until(lambda: cluster.status("allocator")["pid"] not in (0, pid))


def test_the_next_allocator_plans_the_group_again(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    for rank in range(2):
        client.submit(f"r{rank}", [rank, 5, 6], 300, rank)
    client.finish("r0", "r1")
    for rank in range(2):
        assert client.tokens(f"r{rank}") == stream_after([rank, 5, 6], 300)
    stats = cluster.stats()["allocator"]
    assert set(stats["budgets"]) == {"target-0", "target-1"}
