"""Where the actors go and how many threads each gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.schema import ClusterConfig

# Turns a thread spins between two operations before it sleeps (some tenths of a millisecond). Sleeping at once
# (OMP_WAIT_POLICY=PASSIVE) takes 1.7 times as long a step. A tenth of these turns is over before Python has begun the
# next operation: served on two cores, these gave 7 to 14 % more tokens/s without speculation and 10 to 27 % more with
# it (1, 4, 16 streams). Spinning on takes the cores the drafter computes on.
OMP_SPIN_COUNT = 100_000
MARK_AMOUNT = 0.001  # of a resource that only says which machines are meant


@dataclass(frozen=True)
class Slot:
    """A named actor and the bundle of the placement group it lives in."""

    name: str
    bundle: int
    num_threads: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Placement:
    """One bundle for each rank and the drafters beside it, so that a proposal seldom leaves its machine."""

    bundles: tuple[dict[str, float], ...]
    targets: tuple[Slot, ...]
    drafters: tuple[Slot, ...]
    # names of the ranks that step together; none where each is on its own
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def pools(self) -> tuple[range, ...]:
        """Bundles that Ray places as one: those of a group, or all where every rank is on its own."""
        size = len(self.groups[0]) if self.groups else len(self.bundles)
        return tuple(range(i, i + size) for i in range(0, len(self.bundles), size))

    @property
    def strategy(self) -> str:
        """Ranks of a group talk in every layer: on few machines. Others keep out of each other's way."""
        return "PACK" if self.groups else "SPREAD"

    def place_of(self, slot: Slot) -> tuple[int, int]:
        """Number of the slot's pool, and of its bundle in there."""
        return divmod(slot.bundle, len(self.pools[0]))

    @property
    def num_cpus(self) -> float:
        return sum(bundle.get("CPU", 0.0) for bundle in self.bundles)

    @property
    def num_gpus(self) -> float:
        return sum(bundle.get("GPU", 0.0) for bundle in self.bundles)


def plan_placement(config: ClusterConfig, cores_per_node: int, num_nodes: int = 1) -> Placement:
    """Bundles and threads for `config` on nodes of this size."""
    target, drafter = config.target, config.drafter
    num_drafters = drafter.num_actors if config.model.drafter else 0
    threads = plan_threads(config, cores_per_node, num_nodes)
    targets = tuple(
        Slot(name, i, threads[0], target.num_cpus, target.num_gpus)
        for i, name in enumerate(target.rank_names)
    )
    drafters = tuple(
        Slot(f"drafter-{i}", i % target.num_ranks, threads[1], drafter.num_cpus, drafter.num_gpus)
        for i in range(num_drafters)
    )
    bundles: list[dict[str, float]] = [{} for _ in targets]
    for slot in targets + drafters:
        for resource, amount in (("CPU", slot.num_cpus), ("GPU", slot.num_gpus)):
            if amount:
                bundle = bundles[slot.bundle]
                bundle[resource] = bundle.get(resource, 0.0) + amount
    for bundle in bundles:
        if not bundle:
            bundle["CPU"] = MARK_AMOUNT  # Ray refuses an empty bundle
        if target.node_resource:
            bundle[target.node_resource] = MARK_AMOUNT
    names, size = [slot.name for slot in targets], target.group_size
    starts = range(0, len(names), size) if size > 1 else ()
    groups = tuple(tuple(names[start : start + size]) for start in starts)
    return Placement(tuple(bundles), targets, drafters, groups)


def plan_threads(config: ClusterConfig, cores_per_node: int, num_nodes: int = 1) -> tuple[int, int]:
    """CPU threads of a rank and of a drafter; 0 in the configuration asks for this.

    A rank and its drafter take turns, so both may use the same cores. Ranks run at the same time as other ranks,
    and drafters as other drafters.
    """
    ranks_here = -(-config.target.num_ranks // num_nodes)
    drafters_here = -(-config.drafter.num_actors // num_nodes)
    of_target = config.target.num_threads or max(1, cores_per_node // ranks_here)
    of_drafter = config.drafter.num_threads or max(
        1, cores_per_node // max(ranks_here, drafters_here)
    )
    return of_target, of_drafter


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment of a process that computes with so many threads; to be set before torch is imported."""
    return {"OMP_NUM_THREADS": str(num_threads), "GOMP_SPINCOUNT": str(OMP_SPIN_COUNT)}


def no_room(placement: Placement, have: Mapping[str, float]) -> str:
    """Why a placement does not fit what Ray has, and what to change; missing GPUs are named first."""
    gpus = have.get("GPU", 0)
    remedy = "lower target.num_ranks, target.num_cpus or drafter.num_cpus, or add machines"
    if gpus < placement.num_gpus:
        remedy = (
            "serve on the CPU (--config laptop-cpu), lower target.num_gpus and drafter.num_gpus, "
            "or add GPUs"
        )
    return (
        f"no room for {len(placement.bundles)} ranks with their drafters: they reserve "
        f"{placement.num_cpus:g} CPUs and {placement.num_gpus:g} GPUs, "
        f"Ray has {have.get('CPU', 0):g} and {gpus:g}; {remedy}"
    )
