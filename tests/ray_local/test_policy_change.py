"""The policy of a running cluster changes under its streams, and outlives the processes that follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import RayError, RayTaskError

from configs.change import FixedSettingError
from configs.schema import ClusterConfig
from tests.ray_fakes import NUM_RIGHT, stream_after

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT, TOKENS = [4, 2, 9], 900


@pytest.fixture(scope="module")
def cluster(start_cluster: Any, make_config: Any) -> Any:
    return start_cluster(make_config(1, 1))


def change(cluster: Any, **sections: Any) -> dict[str, Any]:
    wanted = ClusterConfig.model_validate({**cluster.config.model_dump(), **sections})
    return ray.get(cluster.supervisor.reconfigure.remote(wanted), timeout=30)


def status(cluster: Any) -> dict[str, Any]:
    """Of the cluster, while the supervisor itself may be starting again."""
    try:
        return ray.get(cluster.supervisor.status.remote(), timeout=30)
    except RayError:
        return {"is_settled": False, "policy": ""}


def follows(cluster: Any, name: str) -> str:
    if name == "supervisor":
        return status(cluster)["policy"]
    return cluster.stats().get(name, {}).get("policy", "")


def test_streams_cross_changes_of_policy_without_losing_a_token(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("a", PROMPT, TOKENS)
    names = ("none", "static_length", "static_threshold", "joint", "lagged", "none")
    for turn, name in enumerate(names, start=1):
        client.until(lambda turn=turn: len(client.tokens("a")) > turn * 60)
        answer = change(cluster, policy={"name": name, "static_length": NUM_RIGHT})
        assert answer["told"] == ["allocator", "target-0"] and not answer["late"]
        assert follows(cluster, "target-0") == name
    before = cluster.stats()["target-0"]
    client.finish("a", within_s=120)
    assert client.tokens("a") == stream_after(PROMPT, TOKENS)
    # Under `none`, the last order, nothing is verified and the drafter holds nothing.
    assert cluster.stats()["target-0"]["num_budgets_refused"] >= before["num_budgets_refused"]
    cluster.until(lambda: cluster.stats()["drafter-0"]["open_requests"] == 0)


def test_a_rank_and_a_supervisor_that_start_again_follow_the_last_order(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    number = change(cluster, policy={"name": "static_length", "static_length": 2})["number"]
    for name in ("supervisor", "target-0", "allocator"):
        cluster.kill(name)
        cluster.until(lambda: status(cluster)["is_settled"])
        cluster.until(lambda name=name: follows(cluster, name) == "static_length")
    assert cluster.call("target-0", "describe").order.number == number
    client = open_client(cluster)
    client.submit("after", PROMPT, 40)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 40)


def test_another_drafter_is_refused_by_name(cluster: Any) -> None:
    with pytest.raises(RayTaskError) as refused:
        change(cluster, model={**cluster.config.model.model_dump(), "drafter": "ngram"})
    assert isinstance(refused.value.cause, FixedSettingError)
    assert "model.drafter" in str(refused.value)
