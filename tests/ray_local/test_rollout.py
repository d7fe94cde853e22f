"""A rollout with scripted engines: a group restarts as a whole, and what was rolled out outlives every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from actors.core.rollout_plan import Bounds, NobodyLeftError
from cluster import launch as launcher
from cluster.rollout import RolloutError, Wish
from configs.schema import ClusterConfig
from tests import ray_fakes
from tests.ray_fakes import stream_after
from tests.ray_local.conftest import FAKE_PARTS, Cluster, small_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [5, 6, 7]
WITHIN_S = 120.0
BOUNDS = Bounds(drain_s=0.0, start_s=60.0)


def wanted(cluster: Cluster, **target: Any) -> ClusterConfig:
    settings = cluster.ask("settings")
    return ClusterConfig.model_validate({**settings, "target": {**settings["target"], **target}})


def roll(cluster: Cluster, config: ClusterConfig, bounds: Bounds = BOUNDS) -> dict[str, Any]:
    """Begin it and wait for its end."""
    cluster.ask("rollout", Wish(config, None, bounds))
    return until_over(cluster)


def until_over(cluster: Cluster) -> dict[str, Any]:
    def progress() -> dict[str, Any] | None:
        found: dict[str, Any] = cluster.ask("rollout_progress")
        return found if found["outcome"] != "running" else None

    over: dict[str, Any] = cluster.until(progress, WITHIN_S)
    return over


def revisions(cluster: Cluster) -> dict[str, int]:
    return {member["name"]: member["revision"] for member in cluster.ask("status")["members"]}


def is_there(cluster: Cluster) -> bool:
    try:
        status = cluster.ask("status")
    except RayError:
        return False
    return status["is_settled"] and all(m["state"] == "ready" for m in status["members"])


@pytest.fixture(scope="module")
def cluster(start_cluster: Any, make_config: Any) -> Any:
    return start_cluster(make_config(2, 1))


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> None:
    if "cluster" in request.fixturenames:
        found: Cluster = request.getfixturevalue("cluster")
        found.until(lambda: is_there(found), WITHIN_S)


def test_a_policy_alone_restarts_nobody(cluster: Cluster) -> None:
    before = {m["name"]: m["pid"] for m in cluster.ask("status")["members"]}
    settings = cluster.ask("settings")
    changed = {**settings, "policy": {**settings["policy"], "name": "static_length"}}
    over = roll(cluster, ClusterConfig.model_validate(changed))
    assert over["outcome"] == "done" and over["steps"] == []
    status = cluster.ask("status")
    assert status["policy"] == "static_length" == cluster.ask("settings")["policy"]["name"]
    assert {m["name"]: m["pid"] for m in status["members"]} == before
    assert set(revisions(cluster).values()) == {over["revision"]}


def test_what_was_rolled_out_outlives_the_supervisor_and_every_rank(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    over = roll(cluster, wanted(cluster, max_running=7))
    assert [step["phase"] for step in over["steps"]] == ["done", "done"]
    for name in ("supervisor", "target-0", "supervisor"):
        cluster.kill(name)
        cluster.until(lambda: is_there(cluster), WITHIN_S)
    assert set(revisions(cluster).values()) == {over["revision"]}
    assert cluster.ask("settings")["target"]["max_running"] == 7
    stats = cluster.stats()
    assert [stats[f"target-{i}"]["max_running"] for i in range(2)] == [7, 7]
    client = open_client(cluster)
    client.submit("after", PROMPT, 50)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 50)


def test_a_rollout_that_dies_with_its_supervisor_goes_on_when_it_is_asked_for_again(
    cluster: Cluster,
) -> None:
    config = wanted(cluster, max_running=9)
    cluster.ask("rollout", Wish(config, None, BOUNDS))
    cluster.until(lambda: cluster.ask("rollout_progress")["steps"][0]["phase"] == "restarting")
    cluster.kill("supervisor")
    cluster.until(lambda: is_there(cluster), WITHIN_S)
    assert cluster.ask("rollout_progress")["outcome"] == "none"
    assert len(set(revisions(cluster).values())) == 2, "one rank was assigned the new one"
    assert roll(cluster, config)["outcome"] == "done"
    assert len(set(revisions(cluster).values())) == 1
    stats = cluster.stats()
    assert [stats[f"target-{i}"]["max_running"] for i in range(2)] == [9, 9]


def test_only_one_rollout_runs_at_a_time_and_one_that_is_stopped_leaves_the_rest(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("held", PROMPT, 900, rank=0)
    client.until(lambda: len(client.tokens("held")) > 5)
    before = revisions(cluster)
    patient = replace(BOUNDS, drain_s=600.0)
    cluster.ask("rollout", Wish(wanted(cluster, max_running=11), None, patient))
    with pytest.raises(RayTaskError) as refused:
        cluster.ask("rollout", Wish(wanted(cluster, max_running=12), None, patient))
    assert isinstance(refused.value.cause, RolloutError)
    cluster.ask("stop_rollout")
    assert until_over(cluster)["outcome"] == "stopped"
    client.finish("held")
    assert client.tokens("held") == stream_after(PROMPT, 900)
    assert revisions(cluster) == before


def test_a_group_restarts_as_a_whole_and_only_where_a_pause_is_allowed(local_ray: None) -> None:
    launcher.shutdown()
    config = small_config(2, 1)
    target = config.target.model_copy(update={"group_size": 2, "collective_timeout_s": 8.0})
    config = config.model_copy(update={"target": target})
    launcher.launch(config, parts=replace(FAKE_PARTS, target_engine=ray_fakes.FakeGroupTarget))
    group = Cluster(config)
    try:
        group.until(lambda: is_there(group), WITHIN_S)
        before = [route.endpoint.epoch for route in group.routing().ranks]
        change = wanted(group, max_running=7)
        with pytest.raises(RayTaskError) as refused:
            group.ask("rollout", Wish(change, None, BOUNDS))
        assert isinstance(refused.value.cause, NobodyLeftError)
        over = roll(group, change, replace(BOUNDS, allows_pause=True))
        assert [(s["members"], s["phase"]) for s in over["steps"]] == [
            (["target-0", "target-1"], "done")
        ], over
        group.until(lambda: is_there(group), WITHIN_S)
        after = [route.endpoint.epoch for route in group.routing().ranks]
        assert not set(before) & set(after)
        assert [group.stats()[f"target-{i}"]["max_running"] for i in range(2)] == [7, 7]
    finally:
        launcher.shutdown()


def test_ranks_are_parked_and_started_by_what_a_token_takes_and_no_stream_breaks(
    start_cluster: Any, make_config: Any, open_client: Callable[..., Any]
) -> None:
    patient = {"up_after_s": 0.0, "down_after_s": 2.0, "cooldown_s": 0.0}
    slow = {"enabled": True, "target_tpot_ms": 10_000.0, **patient}
    cluster: Cluster = start_cluster(make_config(2, 1, autoscale=slow))
    client = open_client(cluster)
    client.submit("kept", PROMPT, 800, rank=0)
    before = cluster.routing().ranks[0].endpoint
    cluster.until(lambda: cluster.status("target-1")["state"] == "parked", WITHIN_S)
    assert cluster.ask("stats").keys() & {"target-0", "target-1"} == {"target-0"}
    # "park" until the rank's turn is over, a round or two after it is seen parked
    cluster.until(lambda: cluster.ask("status")["autoscale"]["kind"] == "keep", WITHIN_S)
    client.finish("kept")
    assert client.tokens("kept") == stream_after(PROMPT, 800)
    # One token may take next to nothing now: even an idle rank is too slow.
    settings = cluster.ask("settings")
    fast = {**settings["autoscale"], "target_tpot_ms": 0.001}
    config = ClusterConfig.model_validate({**settings, "autoscale": fast})
    assert roll(cluster, config)["steps"] == []
    cluster.until(lambda: is_there(cluster), WITHIN_S)
    ranks = cluster.routing().ranks
    assert [route.state for route in ranks] == ["ready", "ready"] and ranks[0].endpoint == before
    client.submit("after", PROMPT, 100, rank=1)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 100)
