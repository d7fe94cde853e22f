"""The actors of a cluster and the room that is reserved for them: started, found again, ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.allocator import AllocatorActor
from actors.drafter import DrafterActor
from actors.link import Membership, Role
from actors.peers import Seat
from actors.target import TargetActor
from cluster.model_share import SOURCE, ModelSource, source_name
from cluster.names import NAMESPACE
from cluster.parts import Parts
from cluster.placement import MARK_AMOUNT, Placement, Slot, no_room, thread_environment
from cluster.supervisor import HANG_AFTER_S, Supervisor
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


class NoRoomError(RuntimeError):
    """Ray has not what the ranks reserve; says what to change."""


@dataclass
class Members:
    """Everything of ours that runs on Ray, but for the ingress.

    Args:
        parts: what computes.
        outlives: whether it stays when the process that started it ends.
        room_timeout_s: how long to wait for machines on a Ray of several.
    """

    parts: Parts
    outlives: bool = False
    room_timeout_s: float = PLACEMENT_TIMEOUT_S
    actors: dict[str, Any] = field(default_factory=dict)  # by name, in the order of their start
    pools: list[PlacementGroup] = field(default_factory=list)

    def reserve(self, placement: Placement, grows: bool) -> None:
        """Have the room; `grows`: machines may still come, so wait for them.

        Raises:
            NoRoomError: there is not enough.
        """
        lifetime = "detached" if self.outlives else None
        for number, pool in enumerate(placement.pools):
            bundles = [placement.bundles[i] for i in pool]
            name, strategy = pool_name(number), placement.strategy
            self.pools.append(placement_group(bundles, strategy, name=name, lifetime=lifetime))
        # One machine of our own will not grow: what it lacks now it lacks for good.
        is_hopeless = not grows and ray.cluster_resources().get("GPU", 0) < placement.num_gpus
        timeout_s = 0 if is_hopeless else self.room_timeout_s
        try:
            ray.get([pool.ready() for pool in self.pools], timeout=timeout_s)
        except GetTimeoutError:
            # What waits for a place is what Ray's autoscaler rents machines for; until they are there takes minutes.
            longer = "; where Ray rents machines, wait longer: dspark deploy --room-seconds 900"
            lacking = no_room(placement, ray.cluster_resources())
            raise NoRoomError(lacking + (longer if grows else "")) from None

    def share(self, folders: dict[str, str]) -> None:
        """Hand out these folders of this machine, by their digests, for as long as the cluster runs."""
        if folders:
            self._start(ModelSource, SOURCE, folders, options=_here())

    def share_more(self, folders: dict[str, str]) -> None:
        """Hand out these too, of a cluster that runs; what is handed out already stays as it is."""
        for digest, folder in folders.items():
            name = source_name(digest)
            if name not in self.actors:
                self._start(ModelSource, name, {digest: folder}, options=_here())

    def start(
        self,
        config: ClusterConfig,
        placement: Placement,
        host: str | None,
        about: Mapping[str, Any],
    ) -> None:
        """Create all actors; links listen on `host`, or where None on each node's own address.

        `about` is what the supervisor tells whoever finds it.
        """
        membership = Membership.create()
        watched: list[tuple[str, Role]] = [("allocator", "allocator")]
        watched += [(slot.name, "drafter") for slot in placement.drafters]
        watched += [(slot.name, "target") for slot in placement.targets]

        def seat(name: str, num_threads: int = 1, rank: int = 0) -> Seat:
            telemetry = config.telemetry
            return Seat(name, membership, host, num_threads, NAMESPACE, rank, telemetry)

        watching = (config, HANG_AFTER_S, placement.groups)
        supervising = (watched, membership, host, NAMESPACE, *watching, dict(about))
        allocator, drafter, target = _classes(config)
        beside = _beside_ingress(config)
        self._start(Supervisor, "supervisor", *supervising, options=beside)
        self._start(allocator, "allocator", seat("allocator"), config, options=beside)
        for slot in placement.drafters:
            place = seat(slot.name, slot.num_threads)
            options = self._options(slot, placement)
            self._start(
                drafter, slot.name, place, config, self.parts.drafter_engine, options=options
            )
        for rank, slot in enumerate(placement.targets):
            arguments = (seat(slot.name, slot.num_threads, rank), config, self.parts.target_engine)
            options = self._options(slot, placement)
            measure = self.parts.measure_steps
            self._start(target, slot.name, *arguments, measure, options=options)

    def _options(self, slot: Slot, placement: Placement) -> dict[str, Any]:
        number, index = placement.place_of(slot)
        strategy = PlacementGroupSchedulingStrategy(
            self.pools[number], placement_group_bundle_index=index
        )
        environment = {"env_vars": thread_environment(slot.num_threads)}
        return {
            "num_cpus": slot.num_cpus,
            "num_gpus": slot.num_gpus,
            "scheduling_strategy": strategy,
            "runtime_env": environment,
        }

    def _start(self, cls: type, name: str, *arguments: Any, options: dict[str, Any]) -> None:
        """Create a named actor that Ray starts again for ever."""
        actor: Any = ray.remote(cls).options(
            name=name,
            namespace=NAMESPACE,
            max_restarts=-1,
            max_task_retries=0,
            lifetime="detached" if self.outlives else None,
            **options,
        )
        self.actors[name] = actor.remote(*arguments)

    def find(self, names: list[str], num_pools: int) -> None:
        """Take over what another process has started."""
        sources = [name for name in named_actors() if name.startswith(f"{SOURCE}-")]
        for name in ("supervisor", SOURCE, *sources, *names):
            with contextlib.suppress(ValueError):  # it has ended for good
                self.actors[name] = ray.get_actor(name, namespace=NAMESPACE)
        for number in range(num_pools):
            with contextlib.suppress(ValueError):
                self.pools.append(get_placement_group(pool_name(number)))

    def stop(self) -> None:
        """End them all, whatever one of them does."""
        sources = [name for name in self.actors if name.startswith(SOURCE)]
        for name in ("supervisor", *sources):  # first: it would report what now ends as failures
            if name in self.actors:
                with survive(name):
                    ray.kill(self.actors.pop(name))
        self._stop_actors()
        for pool in self.pools:
            with survive("placement group"):
                remove_placement_group(pool)

    def _stop_actors(self) -> None:
        """Targets first, so that nobody waits for a drafter that has gone; then end the processes."""
        targets = [name for name in self.actors if name.startswith("target")]
        for names in (targets, [name for name in self.actors if name not in targets]):
            with survive("actors"):
                ray.wait(
                    [self.actors[name].stop.remote() for name in names],
                    num_returns=len(names),
                    timeout=STOP_TIMEOUT_S,
                )
            for name in names:
                with survive(name):
                    ray.kill(self.actors[name])


def _here() -> dict[str, Any]:
    """Ray options of what must run on this machine or nowhere: the folders lie here only."""
    here = ray.get_runtime_context().get_node_id()
    affinity = NodeAffinitySchedulingStrategy(here, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": affinity}


def _beside_ingress(config: ClusterConfig) -> dict[str, Any]:
    """Ray options of what computes little and must not share a machine's fate with a rank: where the ingress may be."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "runtime_env": {"env_vars": thread_environment(1)},
    }
    if mark := config.ingress.node_resource:
        # No affinity to one node: Ray gives a soft one up when it pleases, and a hard one dies with its node.
        return options | {"resources": {mark: MARK_AMOUNT}}
    here = ray.get_runtime_context().get_node_id()
    return options | {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}


def named_actors() -> list[str]:
    """Of our namespace."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]


def _classes(config: ClusterConfig) -> tuple[type, type, type]:
    """Of allocator, drafters and targets. Only in a drill they know how to be disturbed."""
    if not config.link.drills:
        return AllocatorActor, DrafterActor, TargetActor
    from actors.drills import DrilledAllocator, DrilledDrafter, DrilledTarget

    return DrilledAllocator, DrilledDrafter, DrilledTarget


def pool_name(number: int) -> str:
    """Of a placement group."""
    return f"dspark-{number}"


@contextlib.contextmanager
def survive(what: str) -> Iterator[None]:
    """Stopping goes on, whatever one part does."""
    try:
        yield
    except Exception as error:
        log.warning("%s did not stop in order: %s", what, error)
