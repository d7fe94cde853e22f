"""A deployment that outlives whoever made it: what it says of itself, how it is found again, how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from cluster.members import Members
from cluster.names import NAMESPACE, SUPERVISOR
from cluster.parts import Parts
from cluster.ray_session import RaySession
from configs.schema import ClusterConfig

ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Deployment:
    """What the supervisor can tell about it at any time."""

    endpoint: str  # http://host:port/v1
    model: str
    numerics: str
    version: str  # of this software, where it was deployed from
    deployed_at_s: float  # seconds since the epoch
    num_pools: int  # placement groups
    settings: dict[str, Any]  # the configuration, as it was deployed
    is_local: bool = (
        False  # all on one machine: folders are named as they are, not by their content
    )

    @classmethod
    def of(
        cls, config: ClusterConfig, num_pools: int, address: str, *, is_local: bool
    ) -> Deployment:
        """`address` is that of the node it is deployed from."""
        return cls(
            config.ingress.endpoint(address),
            config.model.name,
            config.model.numerics,
            version("dspark-cluster"),
            time.time(),
            num_pools,
            config.model_dump(mode="json"),
            is_local,
        )


@contextmanager
def join(address: str, parts: Parts | None = None) -> Iterator[Found | None]:
    """The deployment on the Ray at `address` ("host:port", or "auto" for that of this machine); None without one.

    Raises:
        RaySessionError: that Ray cannot be joined.
    """
    session = RaySession(address, NAMESPACE)
    session.open(0)
    try:
        yield find(parts or Parts.real())
    finally:
        session.close()


@dataclass
class Found:
    """A deployment, with what reaches it."""

    supervisor: Any
    members: Members

    @property
    def deployment(self) -> Deployment:
        return Deployment(**self.ask("deployment"))

    def ask(self, method: str) -> dict[str, Any]:
        """An answer of the supervisor: to "status", "stats" or "deployment"."""
        import ray

        asked: Any = getattr(self.supervisor, method).remote()
        answer: dict[str, Any] = ray.get(asked, timeout=ASK_TIMEOUT_S)
        return answer

    def end(self) -> None:
        """Streams end with an event that says so; then nothing of ours is left on that Ray."""
        parts = self.members.parts
        os.environ.update(parts.node_environment())  # Serve reads it when it is imported
        parts.stop_ingress()
        self.members.stop()


def find(parts: Parts) -> Found | None:
    """The deployment on the Ray that this process is part of."""
    import ray

    try:
        supervisor: Any = ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
    except ValueError:
        return None
    found = Found(supervisor, Members(parts, outlives=True))
    names = [member["name"] for member in found.ask("status")["members"]]
    found.members.find(names, found.deployment.num_pools)
    return found
