"""Which faults there are, and a seeded plan of when each of them strikes. No clock, no I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Action = Literal["kill", "pause", "disturb", "shift", "crowd", "leave"]
Topology = Literal["ranks", "group"]

MEAN_GAP_S = 1.0  # between two faults, where nothing has to be waited for


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        roles: of the parts that it may hit.
        topology: ranks on their own, or ranks of one group.
    """

    name: str
    action: Action
    roles: tuple[str, ...]
    topology: Topology
    summary: str


_MEMBERS = ("target", "drafter", "allocator")
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("rank", "kill", ("target",), "ranks", "SIGKILL of a target rank"),
        Kind("group", "kill", ("target",), "group", "SIGKILL of a rank of a group"),
        Kind("drafter", "kill", ("drafter",), "ranks", "SIGKILL of a drafter"),
        Kind("allocator", "kill", ("allocator",), "ranks", "SIGKILL of the allocator"),
        Kind("supervisor", "kill", ("supervisor",), "ranks", "SIGKILL of the supervisor"),
        Kind("ingress", "kill", ("ingress",), "ranks", "SIGKILL of an ingress replica"),
        Kind("pause-rank", "pause", ("target",), "ranks", "SIGSTOP of a rank for a while"),
        Kind("pause-group", "pause", ("target",), "group", "SIGSTOP of a rank of a group"),
        Kind("pause-drafter", "pause", ("drafter",), "ranks", "SIGSTOP of a drafter"),
        Kind("pause-allocator", "pause", ("allocator",), "ranks", "SIGSTOP of the allocator"),
        Kind("messages", "disturb", _MEMBERS, "ranks", "messages lost, repeated and late"),
        Kind("clock", "shift", _MEMBERS, "ranks", "the wall clock of a part jumps, and back"),
        Kind("memory", "crowd", (), "ranks", "more streams than the KV cache holds"),
        Kind("abort", "leave", (), "ranks", "half of the clients hang up"),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        pick: in [0, 1), which of the possible victims.
        size: in [0, 1), how long or how far; what that means is the kind's.
        gap_s: seconds after the fault before it.
    """

    number: int
    kind: str
    pick: float
    size: float
    gap_s: float


def plan(kinds: Iterable[str], kills: int, seed: int) -> list[Fault]:
    """`kills` faults of each kind, in an order, with victims, sizes and gaps that follow from the seed alone."""
    rng = random.Random(seed)
    names = [name for name in kinds for _ in range(kills)]
    rng.shuffle(names)
    return [
        Fault(number, name, rng.random(), rng.random(), rng.expovariate(1 / MEAN_GAP_S))
        for number, name in enumerate(names)
    ]


def next_possible(waiting: Sequence[Fault], possible: dict[str, bool]) -> Fault | None:
    """The first fault whose kind can strike now: none waits for a victim that another fault has."""
    return next((fault for fault in waiting if possible.get(fault.kind, False)), None)
