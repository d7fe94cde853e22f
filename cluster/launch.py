"""From a configuration to a serving cluster, and back to nothing.

Order: Ray, placement group, supervisor, allocator, drafters, targets (they load at the same time), all connected and
ready, then the ingress. The end goes the other way round.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.app import IngressStartError
from cluster.deployment import Deployment, find
from cluster.members import PLACEMENT_TIMEOUT_S, Members, NoRoomError, survive
from cluster.names import NAMESPACE, SUPERVISOR
from cluster.parts import ModelNotFoundError, Parts
from cluster.placement import plan_placement
from cluster.ray_session import RaySession, RaySessionError, log_folder
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0  # the first start fetches and converts the model
STATUS_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.2
INGRESS_CPUS = 2.0  # offered to Serve beside what the actors reserve

Progress = Callable[[str], None]


class LaunchError(RuntimeError):
    """The cluster could not start; one line that says which part, why, and what to do."""


@dataclass(frozen=True)
class LaunchedCluster:
    """A cluster that answers requests."""

    endpoint_url: str
    ray_address: str
    namespace: str


@dataclass
class _Running:
    """What has been started so far, so that it can be ended at any moment."""

    parts: Parts
    session: RaySession
    members: Members
    ingress_started: bool = False


_running: _Running | None = None  # `shutdown` must find it when `launch` was interrupted


def launch(
    config: ClusterConfig,
    progress: Progress = log.info,
    address: str | None = None,
    parts: Parts | None = None,
    *,
    outlives: bool = False,
    room_timeout_s: float = PLACEMENT_TIMEOUT_S,
) -> LaunchedCluster:
    """Start everything and return when the endpoint answers. Call `shutdown` afterwards, however this ends.

    Args:
        config: the cluster's configuration.
        progress: takes one line for each thing done.
        address: of a running Ray cluster to join; None starts a local one.
        parts: what computes and what answers HTTP; None takes the real ones.
        outlives: of a cluster that was joined: what was started stays when this process ends. `shutdown` after a
            successful launch then leaves it alone; `cluster.deployment.end` ends it.
        room_timeout_s: of a cluster that was joined: how long to wait for machines it may still rent.

    Raises:
        LaunchError: a part could not start.
    """
    global _running
    if _running is not None:
        raise LaunchError("a cluster is already running in this process; call shutdown() first")
    if config.ingress.warning:
        progress(f"WARNING: {config.ingress.warning}")
    parts = parts or Parts.real()
    session = RaySession(address, NAMESPACE)
    running = _running = _Running(parts, session, Members(parts, outlives, room_timeout_s))
    started = time.monotonic()

    def note(text: str) -> None:
        progress(f"{text} ({time.monotonic() - started:.1f} s)")

    try:
        endpoint_url = _bring_up(config, running, note)
    except (RaySessionError, ModelNotFoundError, IngressStartError, NoRoomError) as error:
        raise LaunchError(str(error)) from error
    except RayError as error:
        raise LaunchError(f"Ray: {error}; see {log_folder()}") from error
    note(f"ingress ready at {endpoint_url}")
    launched = LaunchedCluster(endpoint_url, session.address, NAMESPACE)
    if outlives:
        session.close()
        _running = None
    return launched


def _bring_up(config: ClusterConfig, running: _Running, note: Progress) -> str:
    parts, session, members = running.parts, running.session, running.members
    parts.fetch_model(config)
    # Serve reads it when it is imported.
    os.environ.update(parts.environment(config) if session.is_local else parts.node_environment())
    note("starting Ray" if session.is_local else "joining Ray")
    session.open(plan_placement(config, os.cpu_count() or 1).num_cpus + INGRESS_CPUS)
    note("Ray is up")
    if not session.is_local:
        _require_nothing_deployed()
    config, deployment = _bring_members_up(config, session, members, note)
    running.ingress_started = True
    note("starting the ingress")
    try:
        answered = parts.run_ingress(config)
    except IngressStartError:
        raise
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise LaunchError(f"ingress: {error}; see {log_folder()}") from error
    finally:
        session.remember_processes()
    return answered if session.is_local else deployment.endpoint


def _bring_members_up(
    config: ClusterConfig, session: RaySession, members: Members, note: Progress
) -> tuple[ClusterConfig, Deployment]:
    """Everything but the ingress, ready; returns the configuration as the nodes know it."""
    if session.is_local:  # links listen on loopback
        placement, host = plan_placement(config, os.cpu_count() or 1), "127.0.0.1"
    else:
        placement, host = plan_placement(config, *session.shape()), None
        config, folders = members.parts.share_models(config)
        members.share(folders)
    note(f"waiting for room for {len(placement.bundles)} ranks")
    members.reserve(placement, grows=not session.is_local)
    deployment = Deployment.of(
        config, len(placement.pools), session.node_address, is_local=session.is_local
    )
    members.start(config, placement, host, asdict(deployment))
    session.remember_processes()
    _await_ready(members, note)
    session.remember_processes()
    return config, deployment


def start_members(config: ClusterConfig, parts: Parts) -> ClusterConfig:
    """Everything but the ingress, on the Ray that this process is part of; it outlives this process.

    What runs there with the same settings is left alone. Returns the configuration as the nodes know it.

    Raises:
        LaunchError: a part could not start, or something else is deployed.
    """
    shared, _ = parts.share_models(config)
    found = find(parts)
    if found is not None:
        if found.deployment.settings == shared.model_dump(mode="json"):
            return shared
        _require_nothing_deployed()
    if shared.ingress.warning:
        log.warning(shared.ingress.warning)
    session, members = RaySession(None, NAMESPACE), Members(parts, outlives=True)
    try:
        parts.fetch_model(config)
        return _bring_members_up(config, session, members, log.info)[0]
    except BaseException as error:
        members.stop()
        if isinstance(error, (ModelNotFoundError, NoRoomError, RayError)):
            raise LaunchError(str(error)) from error
        raise


def shutdown() -> None:
    """End what `launch` started, even if it did not get far. Can be repeated; call it on the main thread."""
    global _running
    running, _running = _running, None
    if running is None:
        return
    if not ray.is_initialized():  # it never came up, and any call below would start one
        running.session.close()
        return
    running.session.remember_processes()
    if running.ingress_started:
        with survive("ingress"):
            running.parts.stop_ingress()
    running.members.stop()
    running.session.close()


def _require_nothing_deployed() -> None:
    try:
        ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
    except ValueError:
        return
    raise LaunchError(
        "a deployment runs on this Ray already; end it with `dspark stop --cluster`, then deploy"
    )


# --- starting ----------------------------------------------------------------------------------------


def _await_ready(members: Members, note: Progress) -> None:
    """Until every member is ready and knows the others.

    Raises:
        LaunchError: one of them failed, or the time is up.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    shown: dict[str, str] = {}
    while True:
        status = _status(members.actors["supervisor"])
        for member in status["members"]:
            _raise_if_failed(member)
            text = f"{member['name']} {member['phase']} {member['detail']}".strip()
            if member["pid"] and shown.get(member["name"]) != text:
                shown[member["name"]] = text
                note(text)
        if status["is_settled"] and all(m["state"] == "ready" for m in status["members"]):
            return
        if time.monotonic() > deadline:
            late = [f"{m['name']}: {m['reason']}" for m in status["members"] if m["reason"]]
            raise LaunchError(
                f"not ready within {START_TIMEOUT_S:g} s: {'; '.join(late)}; see {log_folder()}"
            )
        time.sleep(POLL_INTERVAL_S)


def _status(supervisor: Any) -> dict[str, Any]:
    try:
        status: dict[str, Any] = ray.get(supervisor.status.remote(), timeout=STATUS_TIMEOUT_S)
    except RayError as error:
        raise LaunchError(f"supervisor: {error}; see {log_folder()}") from error
    return status


def _raise_if_failed(member: dict[str, Any]) -> None:
    if member["last_failure"] or member["state"] == "dead":
        cause = member["last_failure"] or member["reason"]
        raise LaunchError(f"{member['name']} could not start: {cause} (logs: {log_folder()})")
