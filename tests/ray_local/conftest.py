"""One Ray for all these tests, private to them: its own folder, home and token."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    Message,
    ReservationReply,
    Reserve,
    RoutingTable,
    TokenDelta,
    TokenDeltas,
)
from actors.core.sampling import SamplingParams
from actors.link import Link, open_link
from cluster import launch as launcher
from cluster.parts import Parts
from configs.schema import ClusterConfig
from tests import ray_fakes

FAKE_PARTS = Parts(
    target_engine=ray_fakes.FakeTarget,
    drafter_engine=ray_fakes.FakeDrafter,
    measure_steps=ray_fakes.fake_step_times,
    run_ingress=lambda _config: "http://127.0.0.1:0/v1",
    stop_ingress=lambda: None,
)


def small_config(num_ranks: int = 1, num_drafters: int = 1, **sections: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"name": "fake", "dtype": "float32", "max_model_len": 1024},
            "target": {
                "num_ranks": num_ranks,
                "num_cpus": 0.25,
                "kv_cache_tokens": 8192,
                "max_batch_tokens": 64,
            },
            "drafter": {"num_actors": num_drafters, "num_cpus": 0.25},
            **sections,
        }
    )


@pytest.fixture(scope="session")
def private_home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dr", dir="/tmp"))  # short: a limit on socket paths
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.delenv("RAY_AUTH_MODE", raising=False)  # Ray's own default: a token
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def local_ray(private_home: Path) -> Iterator[None]:
    ray.init(
        address="local",
        namespace=launcher.NAMESPACE,
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Cluster:
    """A running cluster of scripted engines, and what tests ask of it."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.supervisor = ray.get_actor("supervisor", namespace=launcher.NAMESPACE)

    def routing(self) -> RoutingTable:
        return ray.get(self.supervisor.routing.remote(), timeout=10)

    def stats(self) -> dict[str, Any]:
        return ray.get(self.supervisor.stats.remote(), timeout=20)

    def status(self, name: str) -> dict[str, Any]:
        members = ray.get(self.supervisor.status.remote(), timeout=10)["members"]
        return next(member for member in members if member["name"] == name)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The supervisor's answer."""
        return ray.get(getattr(self.supervisor, method).remote(*arguments), timeout=30)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        actor = ray.get_actor(name, namespace=launcher.NAMESPACE)
        return ray.get(getattr(actor, method).remote(*arguments), timeout=30)

    def kill(self, name: str) -> None:
        """As a crash would: Ray starts it again. Its process is gone when this returns."""
        actor = ray.get_actor(name, namespace=launcher.NAMESPACE)
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
        ray.kill(actor, no_restart=False)
        self.until(lambda: not psutil.pid_exists(pid))  # until then it may still answer

    def until(self, condition: Callable[[], Any], within_s: float = 60.0) -> Any:
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.1)
        return value

    def open_client(self, name: str) -> Client:
        membership, host = ray.get(self.supervisor.join.remote(), timeout=10)
        host = host or ray.util.get_node_ip_address()
        link = open_link(self.config.link.kind, name, "ingress", membership, host)
        return Client(self, link)


class Client:
    """What an ingress replica does, step by step."""

    def __init__(self, cluster: Cluster, link: Link) -> None:
        self.cluster = cluster
        self.link = link
        self._prefix = f"{link.endpoint.name}:"  # ranks remember the ids of earlier tests
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.replies: dict[str, ReservationReply] = {}
        self.others: list[Message] = []

    def poll(self, timeout_s: float) -> None:
        for message in self.link.poll(timeout_s):
            match message:
                case TokenDeltas():
                    for delta in message.deltas:
                        self.deltas.setdefault(self._short(delta.request_id), []).append(delta)
                case ReservationReply():
                    self.replies[self._short(message.request_id)] = message
                case _:
                    self.others.append(message)

    def full(self, request_id: str) -> str:
        return self._prefix + request_id

    def _short(self, request_id: str) -> str:
        return request_id.removeprefix(self._prefix)

    def until(self, condition: Callable[[], Any], within_s: float = 60.0) -> Any:
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            self.poll(0.05)
        return value

    def submit(self, request_id: str, prompt: list[int], num_tokens: int, rank: int = 0) -> None:
        endpoint = self.cluster.routing().ranks[rank].endpoint
        me = self.link.endpoint
        self.link.send(endpoint, Reserve(self.full(request_id), me, len(prompt), num_tokens))
        reply = self.until(lambda: self.replies.get(request_id))
        assert reply.granted, reply.reason
        self.link.send(
            endpoint,
            AdmittedRequest(
                request_id=self.full(request_id),
                generation=0,
                reply_to=me,
                prompt_ids=np.array(prompt, np.int32),
                num_prior_tokens=0,
                max_new_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0),
            ),
        )

    def abort(self, request_id: str, rank: int = 0) -> None:
        endpoint = self.cluster.routing().ranks[rank].endpoint
        self.link.send(endpoint, AbortRequest(self.full(request_id), 0))

    def tokens(self, request_id: str) -> list[int]:
        """The stream so far; every delta must begin where the one before it ended."""
        tokens: list[int] = []
        for delta in self.deltas.get(request_id, []):
            assert delta.first_index == len(tokens)
            tokens += delta.token_ids
        return tokens

    def finish_reason(self, request_id: str) -> str | None:
        deltas = self.deltas.get(request_id)
        return deltas[-1].finish_reason if deltas else None

    def finish(self, *request_ids: str, within_s: float = 60.0) -> None:
        self.until(lambda: all(self.finish_reason(r) for r in request_ids), within_s)


@pytest.fixture(scope="module")
def start_cluster(local_ray: None) -> Iterator[Callable[[ClusterConfig], Cluster]]:
    """Start a cluster; the one before it ends."""

    def start(config: ClusterConfig) -> Cluster:
        launcher.shutdown()
        launcher.launch(config, parts=FAKE_PARTS)
        return Cluster(config)

    yield start
    launcher.shutdown()


@pytest.fixture
def open_client(request: pytest.FixtureRequest) -> Iterator[Callable[[Cluster], Client]]:
    opened: list[Client] = []

    def open_one(cluster: Cluster) -> Client:
        opened.append(cluster.open_client(f"client-{request.node.name}-{len(opened)}"))
        return opened[-1]

    yield open_one
    for client in opened:
        client.link.close()


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ClusterConfig]:
    return small_config
