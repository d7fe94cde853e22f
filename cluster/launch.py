"""From a configuration to a serving cluster, and back to nothing.

Order: Ray, placement group, supervisor, allocator, drafters, targets (they load at the same time), all connected and
ready, then the ingress. The end goes the other way round.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.allocator import AllocatorActor
from actors.drafter import DrafterActor
from actors.link import Membership, Role
from actors.shell import Seat
from actors.target import TargetActor
from cluster.app import IngressStartError
from cluster.parts import ModelNotFoundError, Parts
from cluster.placement import Placement, Slot, no_room, plan_placement, thread_environment
from cluster.ray_session import RaySession, RaySessionError, log_folder
from cluster.supervisor import HANG_AFTER_S, Supervisor
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

NAMESPACE = "dspark"
START_TIMEOUT_S = 900.0  # the first start fetches and converts the model
PLACEMENT_TIMEOUT_S = 30.0
STATUS_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
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
    placement_group: PlacementGroup | None = None
    actors: dict[str, Any] = field(default_factory=dict)  # by name, in the order of their start
    ingress_started: bool = False


_running: _Running | None = None  # `shutdown` must find it when `launch` was interrupted


def launch(
    config: ClusterConfig,
    progress: Progress = log.info,
    address: str | None = None,
    parts: Parts | None = None,
) -> LaunchedCluster:
    """Start everything and return when the endpoint answers. Call `shutdown` afterwards, however this ends.

    Args:
        config: the cluster's configuration.
        progress: takes one line for each thing done.
        address: of a running Ray cluster to join; None starts a local one.
        parts: what computes and what answers HTTP; None takes the real ones.

    Raises:
        LaunchError: a part could not start.
    """
    global _running
    if _running is not None:
        raise LaunchError("a cluster is already running in this process; call shutdown() first")
    session = RaySession(address, NAMESPACE)
    running = _running = _Running(parts or Parts.real(), session)
    started = time.monotonic()

    def note(text: str) -> None:
        progress(f"{text} ({time.monotonic() - started:.1f} s)")

    try:
        endpoint_url = _bring_up(config, running, note)
    except (RaySessionError, ModelNotFoundError, IngressStartError) as error:
        raise LaunchError(str(error)) from error
    except RayError as error:
        raise LaunchError(f"Ray: {error}; see {log_folder()}") from error
    note(f"ingress ready at {endpoint_url}")
    return LaunchedCluster(endpoint_url, session.address, NAMESPACE)


def _bring_up(config: ClusterConfig, running: _Running, note: Progress) -> str:
    parts, session = running.parts, running.session
    parts.fetch_model(config)
    os.environ.update(parts.environment(config))  # Serve reads it when it is imported
    placement = plan_placement(config, os.cpu_count() or 1)
    session.open(placement.num_cpus + INGRESS_CPUS)
    note("Ray is up")
    if not session.is_local:
        placement = plan_placement(config, *session.shape())
    _reserve(placement)
    # Links listen on loopback unless the cluster may have other machines.
    _start_actors(config, placement, host="127.0.0.1" if session.is_local else None)
    session.remember_processes()
    _await_ready(note)
    session.remember_processes()
    running.ingress_started = True
    try:
        return parts.run_ingress(config)
    except IngressStartError:
        raise
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        raise LaunchError(f"ingress: {error}; see {log_folder()}") from error
    finally:
        session.remember_processes()


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
        with _survive("ingress"):
            running.parts.stop_ingress()
    supervisor = running.actors.pop("supervisor", None)
    if supervisor is not None:  # first: it would report what now ends as failures
        with _survive("supervisor"):
            ray.kill(supervisor)
    _stop_actors(running.actors)
    if running.placement_group is not None:
        with _survive("placement group"):
            remove_placement_group(running.placement_group)
    running.session.close()


# --- starting ----------------------------------------------------------------------------------------


def _reserve(placement: Placement) -> None:
    assert _running is not None
    group: PlacementGroup = placement_group(list(placement.bundles), strategy="PACK", name="dspark")
    _running.placement_group = group
    # One machine of our own will not grow: what it lacks now it lacks for good.
    lacks_gpus = ray.cluster_resources().get("GPU", 0) < placement.num_gpus
    is_hopeless = _running.session.is_local and lacks_gpus
    try:
        ray.get(group.ready(), timeout=0 if is_hopeless else PLACEMENT_TIMEOUT_S)
    except GetTimeoutError:
        raise LaunchError(no_room(placement, ray.cluster_resources())) from None


def _start_actors(config: ClusterConfig, placement: Placement, host: str | None) -> None:
    assert _running is not None
    parts, membership = _running.parts, Membership.create()
    members: list[tuple[str, Role]] = [("allocator", "allocator")]
    members += [(slot.name, "drafter") for slot in placement.drafters]
    members += [(slot.name, "target") for slot in placement.targets]

    def seat(name: str, num_threads: int = 1, rank: int = 0) -> Seat:
        telemetry = config.telemetry
        return Seat(name, membership, host, num_threads, NAMESPACE, rank, telemetry)

    watching = (config, HANG_AFTER_S, placement.groups, config.target.collective_timeout_s)
    _start(Supervisor, "supervisor", None, members, membership, host, NAMESPACE, *watching)
    _start(AllocatorActor, "allocator", None, seat("allocator"), config)
    for slot in placement.drafters:
        place = seat(slot.name, slot.num_threads)
        _start(DrafterActor, slot.name, slot, place, config, parts.drafter_engine)
    for rank, slot in enumerate(placement.targets):
        arguments = (seat(slot.name, slot.num_threads, rank), config, parts.target_engine)
        _start(TargetActor, slot.name, slot, *arguments, parts.measure_steps)


def _start(cls: type, name: str, slot: Slot | None, *arguments: Any) -> None:
    """Create a named actor that Ray starts again for ever."""
    assert _running is not None
    options: dict[str, Any] = {"num_cpus": 0}
    threads = 1
    if slot is None:
        here = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=True)
    else:
        assert _running.placement_group is not None
        threads = slot.num_threads
        options |= {"num_cpus": slot.num_cpus, "num_gpus": slot.num_gpus}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            _running.placement_group, placement_group_bundle_index=slot.bundle
        )
    actor: Any = ray.remote(cls).options(
        name=name,
        namespace=NAMESPACE,
        max_restarts=-1,
        max_task_retries=0,
        runtime_env={"env_vars": thread_environment(threads)},
        **options,
    )
    _running.actors[name] = actor.remote(*arguments)


def _await_ready(note: Progress) -> None:
    """Until every member is ready and knows the others.

    Raises:
        LaunchError: one of them failed, or the time is up.
    """
    assert _running is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    shown: dict[str, str] = {}
    while True:
        status = _status(_running.actors["supervisor"])
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


# --- stopping ----------------------------------------------------------------------------------------


def _stop_actors(actors: dict[str, Any]) -> None:
    """Targets first, so that nobody waits for a drafter that has gone; then end the processes."""
    for names in (
        [n for n in actors if n.startswith("target")],
        [n for n in actors if not n.startswith("target")],
    ):
        with _survive("actors"):
            ray.wait(
                [actors[name].stop.remote() for name in names],
                num_returns=len(names),
                timeout=STOP_TIMEOUT_S,
            )
        for name in names:
            with _survive(name):
                ray.kill(actors[name])


@contextlib.contextmanager
def _survive(what: str) -> Any:
    """Stopping goes on, whatever one part does."""
    try:
        yield
    except Exception as error:
        log.warning("%s did not stop in order: %s", what, error)
