"""Processes of a running cluster are killed, and the streams go on as design §6 says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from actors.link import Role
from cluster.supervisor import Supervisor
from tests.ray_fakes import HANG, stream_after

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [5, 6, 7]
BACK_WITHIN_S = 45.0  # a busy machine; alone it is about two seconds


@pytest.fixture(scope="module")
def cluster(start_cluster: Any, make_config: Any) -> Any:
    return start_cluster(make_config(2, 2))


def is_settled(cluster: Any) -> bool:
    import ray

    status = ray.get(cluster.supervisor.status.remote(), timeout=10)
    return status["is_settled"] and all(m["state"] == "ready" for m in status["members"])


@pytest.fixture(autouse=True)
def settled(cluster: Any) -> None:
    cluster.until(lambda: is_settled(cluster))


def test_killing_the_allocator_changes_no_token_and_its_budgets_come_back(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("r", PROMPT, 900)
    client.until(lambda: len(client.tokens("r")) > 50)
    old = cluster.routing().allocator
    cluster.kill("allocator")
    client.finish("r")
    assert client.tokens("r") == stream_after(PROMPT, 900)

    def is_replaced() -> bool:
        allocator = cluster.routing().allocator
        return allocator is not None and allocator.epoch != old.epoch

    cluster.until(is_replaced, BACK_WITHIN_S)
    cluster.until(lambda: is_settled(cluster))
    client.submit("after", PROMPT, 200)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 200)
    stats = cluster.stats()["allocator"]
    assert stats["num_budgets"] > 0, "the curve was not sent to the new allocator"
    assert stats["ranks"] == ["target-0", "target-1"]


def test_killing_a_drafter_costs_speed_only_until_it_is_back(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("r", PROMPT, 900)
    client.until(lambda: len(client.tokens("r")) > 50)
    cluster.kill("drafter-0")
    client.finish("r")
    assert client.tokens("r") == stream_after(PROMPT, 900)
    cluster.until(lambda: cluster.status("drafter-0")["num_restarts"] > 0, BACK_WITHIN_S)
    cluster.until(lambda: is_settled(cluster), BACK_WITHIN_S)
    client.submit("after", PROMPT, 200)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 200)
    assert client.deltas["after"][-1].num_accepted > 100
    assert cluster.stats()["drafter-0"]["num_blocks"] > 0


def test_a_drafter_that_comes_back_takes_up_a_stream_in_its_middle(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    for i in range(4):
        client.submit(f"r{i}", [i, 2, 3], 1000)
    client.until(lambda: all(len(client.tokens(f"r{i}")) > 20 for i in range(4)))
    cluster.kill("drafter-0")
    client.finish(*(f"r{i}" for i in range(4)), within_s=60)
    for i in range(4):
        assert client.tokens(f"r{i}") == stream_after([i, 2, 3], 1000)
    cluster.until(lambda: is_settled(cluster))
    stats = cluster.stats()
    assert [stats[f"drafter-{i}"]["open_requests"] for i in range(2)] == [0, 0]


def test_a_killed_rank_is_noticed_and_comes_back_under_a_new_epoch(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("lost", PROMPT, 1000, rank=0)
    client.submit("kept", PROMPT, 1000, rank=1)
    client.until(lambda: len(client.tokens("lost")) > 20)
    before = cluster.routing()
    cluster.kill("target-0")
    killed_at = time.monotonic()
    cluster.until(lambda: cluster.routing().version > before.version, BACK_WITHIN_S)
    client.finish("kept")
    assert client.tokens("kept") == stream_after(PROMPT, 1000)

    def is_back() -> bool:
        route = cluster.routing().ranks[0]
        return route.state == "ready" and route.endpoint.epoch != before.ranks[0].endpoint.epoch

    cluster.until(is_back, BACK_WITHIN_S)
    assert time.monotonic() - killed_at < BACK_WITHIN_S
    assert cluster.routing().ranks[1].endpoint == before.ranks[1].endpoint
    # The client goes on from its journal, on the new incarnation.
    done = client.tokens("lost")
    client.submit("rest", PROMPT + done, 1000 - len(done), rank=0)
    client.finish("rest")
    assert done + client.tokens("rest") == stream_after(PROMPT, 1000)
    cluster.until(lambda: cluster.stats()["drafter-0"]["open_requests"] == 0)


def test_a_rank_whose_loop_stands_still_is_ended_and_starts_again(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    import ray

    client = open_client(cluster)
    before = cluster.routing().ranks[1].endpoint
    client.submit("hangs", [HANG, 1, 2], 10, rank=1)
    membership, host = ray.get(cluster.supervisor.join.remote(), timeout=10)
    names: list[tuple[str, Role]] = [("target-1", "target")]
    impatient = Supervisor(names, membership, host, "dspark", cluster.config, hang_after_s=2.0)

    async def watch() -> dict[str, Any]:
        for _ in range(150):
            status = await impatient.status()
            if status["num_killed"]:
                break
            await asyncio.sleep(0.1)
        return status["members"][0]

    assert "stood still" in asyncio.run(watch())["last_failure"]
    cluster.until(lambda: cluster.routing().ranks[1].endpoint != before, BACK_WITHIN_S)
    cluster.until(lambda: is_settled(cluster), BACK_WITHIN_S)
    client.submit("after", PROMPT, 20, rank=1)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 20)


def test_a_killed_supervisor_is_back_and_publishes_higher_versions(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    from ray.exceptions import RayError

    client = open_client(cluster)
    before = cluster.routing()
    client.submit("r", PROMPT, 500)
    cluster.kill("supervisor")

    def is_back() -> bool:
        try:
            table = cluster.routing()
        except RayError:
            return False
        return table.version > before.version and all(r.state == "ready" for r in table.ranks)

    cluster.until(is_back, BACK_WITHIN_S)
    client.finish("r")
    assert client.tokens("r") == stream_after(PROMPT, 500)
    table = cluster.routing()
    assert [r.endpoint for r in table.ranks] == [r.endpoint for r in before.ranks]
    assert table.allocator == before.allocator


def test_poison_on_the_link_of_a_rank_is_refused_and_counted(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    import pickle

    import zmq

    client = open_client(cluster)
    endpoint = cluster.routing().ranks[1].endpoint
    membership, _ = client_membership(cluster)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 2000
        socket.curve_serverkey = endpoint.public_key.encode()
        socket.curve_publickey = membership.public_key.encode()
        socket.curve_secretkey = membership.secret_key.encode()
        socket.connect(endpoint.uri)
        socket.send(pickle.dumps(print, protocol=5))
        cluster.until(lambda: cluster.stats()["target-1"]["link"]["num_refused"] == 1)
    client.submit("r", PROMPT, 50, rank=1)
    client.finish("r")
    assert client.tokens("r") == stream_after(PROMPT, 50)


def client_membership(cluster: Any) -> Any:
    import ray

    return ray.get(cluster.supervisor.join.remote(), timeout=10)


def test_a_message_for_somebody_else_is_counted_and_harms_nothing(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    from actors.core.messages import CloseDraft, LoadView

    client = open_client(cluster)
    table = cluster.routing()
    client.link.send(table.ranks[0].endpoint, CloseDraft("target-0", ()))
    client.link.send(table.allocator, LoadView(1))
    client.poll(0.1)
    cluster.until(lambda: cluster.stats()["target-0"]["num_unexpected"] == 1)
    cluster.until(lambda: cluster.stats()["allocator"]["num_unexpected"] == 1)


def test_a_draining_rank_finishes_what_it_has_and_grants_nothing_new(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    from actors.core.messages import Reserve

    client = open_client(cluster)
    client.submit("running", PROMPT, 800, rank=1)
    client.until(lambda: len(client.tokens("running")) > 5)
    assert cluster.ask("drain", "target-1", True) == ["target-1"]
    assert cluster.routing().ranks[1].state == "draining"
    cluster.until(lambda: cluster.status("target-1")["phase"] == "draining")
    request_id = client.full("refused")
    endpoint = cluster.routing().ranks[1].endpoint
    client.link.send(endpoint, Reserve(request_id, client.link.endpoint, 3, 5))
    reply = client.until(lambda: client.replies.get("refused"))
    assert not reply.granted
    client.finish("running")
    assert client.tokens("running") == stream_after(PROMPT, 800)
    cluster.ask("drain", "target-1", False)
    cluster.until(lambda: cluster.routing().ranks[1].state == "ready")
    client.submit("after", PROMPT, 20, rank=1)
    client.finish("after")
    assert client.tokens("after") == stream_after(PROMPT, 20)


def test_a_drained_rank_that_dies_comes_back_drained_also_behind_another_supervisor(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    from ray.exceptions import RayError

    cluster.ask("drain", "target-1", True)
    cluster.until(lambda: is_settled_but(cluster, "target-1"))
    before = cluster.routing()
    cluster.kill("supervisor")

    def is_back() -> bool:
        try:
            return cluster.routing().version > before.version
        except RayError:
            return False

    cluster.until(is_back, BACK_WITHIN_S)
    assert cluster.routing().ranks[1].state == "draining"
    cluster.kill("target-1")
    cluster.until(
        lambda: cluster.routing().ranks[1].endpoint.epoch != before.ranks[1].endpoint.epoch,
        BACK_WITHIN_S,
    )
    cluster.until(lambda: is_settled_but(cluster, "target-1"), BACK_WITHIN_S)
    assert cluster.status("target-1")["phase"] == "draining"
    cluster.ask("drain", "target-1", False)


def is_settled_but(cluster: Any, drained: str) -> bool:
    """Everybody is ready and knows everybody, but for one that drains."""
    import ray

    status = ray.get(cluster.supervisor.status.remote(), timeout=10)
    wanted = {m["name"]: "draining" if m["name"] == drained else "ready" for m in status["members"]}
    return status["is_settled"] and {m["name"]: m["state"] for m in status["members"]} == wanted
