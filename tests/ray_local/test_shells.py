"""Requests through real actors and real links, with scripted engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ray_fakes import NUM_IDS, NUM_RIGHT, stream_after

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module", params=["zmq", "actor"])
def cluster(request: pytest.FixtureRequest, start_cluster: Any, make_config: Any) -> Any:
    return start_cluster(
        make_config(2, 2, link={"kind": request.param}, policy={"explain_rounds": 4})
    )


def test_a_stream_is_the_targets_own_with_blocks_accepted(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("r", PROMPT, 200)
    client.finish("r")
    assert client.tokens("r") == stream_after(PROMPT, 200)
    last = client.deltas["r"][-1]
    assert last.finish_reason == "length"
    assert last.num_accepted > 50
    assert last.num_accepted <= last.num_scheduled <= last.num_proposed
    assert last.num_rounds >= 200 / (NUM_RIGHT + 1)


def test_both_ranks_serve_at_the_same_time_each_with_its_drafter(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    requests = {f"r{i}": (i % 2, [i + 1, 2, 3]) for i in range(8)}
    for request_id, (rank, prompt) in requests.items():
        client.submit(request_id, prompt, 60, rank)
    client.finish(*requests)
    for request_id, (_, prompt) in requests.items():
        assert client.tokens(request_id) == stream_after(prompt, 60)
        assert client.deltas[request_id][-1].num_accepted > 0
    stats = cluster.stats()
    assert all(stats[f"drafter-{i}"]["num_blocks"] > 0 for i in range(2))


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    prompt = [(i * i) % 900 for i in range(333)]
    client.submit("long", prompt, 20)
    client.submit("short", PROMPT, 100)
    client.finish("long", "short")
    assert client.tokens("long") == stream_after(prompt, 20)
    assert client.tokens("short") == stream_after(PROMPT, 100)


def test_an_abort_ends_the_stream_and_everything_returns_to_its_baseline(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("r", PROMPT, 900)
    client.until(lambda: len(client.tokens("r")) > 20)
    client.abort("r")
    client.finish("r")
    assert client.finish_reason("r") == "abort"
    tokens = client.tokens("r")
    assert tokens == stream_after(PROMPT, len(tokens))

    def is_clean() -> bool:
        stats = cluster.stats()
        ranks = [stats[f"target-{i}"] for i in range(2)]
        return (
            all(r["is_idle"] and r["num_free_blocks"] == r["num_blocks"] for r in ranks)
            and all(r["num_idle_problems"] == 0 for r in ranks)
            and sum(stats[f"drafter-{i}"]["open_requests"] for i in range(2)) == 0
        )

    cluster.until(is_clean)
    assert cluster.stats()["target-0"]["num_idle_checks"] >= 1


def test_a_lost_ingress_replica_frees_its_requests(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("orphan", PROMPT, 1000)
    client.until(lambda: len(client.tokens("orphan")) > 5)
    client.link.close()
    cluster.until(lambda: cluster.stats()["target-0"]["num_running"] == 0, within_s=15)
    assert cluster.stats()["target-0"]["num_aborted"] >= 1


def test_budgets_of_the_allocator_steer_the_rounds_and_can_be_explained(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("explained", PROMPT, 300)
    client.finish("explained")
    found = cluster.call("target-0", "explain", client.full("explained"))
    assert found["is_known"]
    (log,) = found["logs"]
    assert {"survivals", "min_survival", "max_draft_tokens", "cut_by"} <= set(log["rounds"][-1])
    stats = cluster.stats()
    assert stats["allocator"]["num_budgets"] > 0
    # On a busy machine a few come after their last step; most must not.
    num_budgets = stats["allocator"]["num_budgets"]
    assert stats["target-0"]["num_budgets_refused"] <= num_budgets // 4, num_budgets


def test_the_allocator_publishes_the_load_to_subscribers(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    from actors.core.messages import LoadView, Subscribe

    client = open_client(cluster)
    client.link.send(cluster.routing().allocator, Subscribe(client.link.endpoint))
    view = client.until(lambda: next((m for m in client.others if isinstance(m, LoadView)), None))
    assert [rank.rank for rank in view.ranks] == ["target-0", "target-1"]
    assert all(rank.num_blocks > 0 for rank in view.ranks)


def test_control_calls_answer_while_the_loop_computes(
    cluster: Any, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    client.submit("busy", PROMPT, 500)
    description = cluster.call("target-0", "describe")
    assert description.phase == "ready" and description.spec.vocab_size == NUM_IDS
    assert cluster.call("target-0", "profile").identity.startswith("fake")
    client.finish("busy")
