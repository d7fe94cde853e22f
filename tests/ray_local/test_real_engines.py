"""The real engines through the real actors, on a tiny checkpoint: names, taps, threads and curves fit together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.core.messages import AdmittedRequest, Reserve
from actors.core.sampling import SamplingParams
from cluster import launch as launcher
from cluster.parts import Parts
from tests.ray_local.conftest import FAKE_PARTS, Client, Cluster, small_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GAMMA = 3
PROMPT = [5, 17, 40, 8]
counter = itertools.count()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actors.engine.drafters.checkpoint import save_drafter
    from tests.torch_cpu.rank_engines import real_drafter_model, write_tiny_llama

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder)
    save_drafter(real_drafter_model(GAMMA), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def cluster(local_ray: None, checkpoint: Path) -> Iterator[Cluster]:
    launcher.shutdown()
    model = {"path": str(checkpoint), "dtype": "float32", "max_model_len": 256}
    target = {"num_ranks": 2, "kv_cache_tokens": 4096, "max_batch_tokens": 64, "max_running": 8}
    drafter = {"num_actors": 2, "gamma": GAMMA}
    config = small_config(model=model, target=target, drafter=drafter)
    engines = replace(Parts.real(), environment=FAKE_PARTS.environment)
    ingress = {"run_ingress": FAKE_PARTS.run_ingress, "stop_ingress": FAKE_PARTS.stop_ingress}
    launcher.launch(config, parts=replace(engines, **ingress))
    yield Cluster(config)
    launcher.shutdown()


def generate(client: Client, rank: int = 0, num_tokens: int = 60, **params: Any) -> list[int]:
    name = f"g{next(counter)}"
    start(client, name, rank, num_tokens, **params)
    client.finish(name)
    return client.tokens(name)


def start(client: Client, name: str, rank: int, num_tokens: int, **params: Any) -> None:
    endpoint = client.cluster.routing().ranks[rank].endpoint
    request_id, me = client.full(name), client.link.endpoint
    client.link.send(endpoint, Reserve(request_id, me, len(PROMPT), num_tokens))
    assert client.until(lambda: client.replies.get(name)).granted
    sampling = SamplingParams(noise_key=params.get("seed") or 1, **params)
    ids = np.array(PROMPT, np.int32)
    client.link.send(endpoint, AdmittedRequest(request_id, 0, me, ids, 0, num_tokens, sampling))


def test_the_shells_describe_what_they_loaded(cluster: Cluster) -> None:
    target = cluster.call("target-0", "describe")
    assert target.spec.tap_layer_ids == (0, 2)
    assert "does not depend on its batch" in target.detail
    drafter = cluster.call("drafter-1", "describe")
    assert (drafter.spec.name, drafter.spec.gamma) == ("drafter-1", GAMMA)
    profile = cluster.call("target-1", "profile")
    assert (profile.step_time_s > 0).all() and (profile.draft_time_s > 0).all()
    assert profile.gamma == GAMMA


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"]
)
def test_speculation_changes_no_token(
    cluster: Cluster, open_client: Callable[..., Any], params: dict[str, Any]
) -> None:
    client = open_client(cluster)
    plain = generate(client, speculation=False, **params)
    drafted = generate(client, speculation=True, **params)
    assert drafted == plain and len(plain) == 60
    assert sum(delta[-1].num_scheduled for delta in client.deltas.values()) > 0


def test_the_same_seed_gives_the_same_tokens_on_both_ranks_alone_and_in_a_batch(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    alone = [generate(client, rank, temperature=0.9, seed=3) for rank in (0, 1)]
    names = [f"batch-{i}" for i in range(8)]
    for i, name in enumerate(names):
        start(client, name, 0, 60, temperature=0.9, seed=3 if i == 5 else 100 + i)
    client.finish(*names)
    assert alone[0] == alone[1] == client.tokens("batch-5")
    assert client.tokens("batch-0") != alone[0]


def test_killing_the_allocator_or_a_drafter_changes_no_token(
    cluster: Cluster, open_client: Callable[..., Any]
) -> None:
    client = open_client(cluster)
    expected = generate(client, num_tokens=200, temperature=0.9, seed=4)
    for victim in ("allocator", "drafter-0"):
        start(client, victim, 0, 200, temperature=0.9, seed=4)
        client.until(lambda victim=victim: len(client.tokens(victim)) > 5)
        cluster.kill(victim)
        client.finish(victim)
        assert client.tokens(victim) == expected, victim


def test_the_integrity_check_of_idle_ranks_finds_nothing(cluster: Cluster) -> None:
    def ranks() -> list[dict[str, Any]]:
        stats = cluster.stats()
        return [stats[f"target-{i}"] for i in range(2)]

    cluster.until(lambda: all(rank["is_idle"] for rank in ranks()))
    assert all(rank["num_idle_problems"] == 0 for rank in ranks())
    assert ranks()[0]["num_idle_checks"] > 0
    assert all(rank["num_free_blocks"] == rank["num_blocks"] for rank in ranks())
