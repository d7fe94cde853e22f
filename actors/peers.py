"""What processes of the cluster know and say of each other: seats, peers, descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.core.messages import Endpoint
from actors.engine.base import DrafterSpec, TargetSpec
from actors.link import Membership, Role
from configs.change import PolicyOrder
from configs.revisions import FIRST, Assignment
from configs.schema import TelemetryConfig

Phase = Literal[
    "starting",
    "loading",
    "forming",
    "measuring",
    "proving",
    "ready",
    "draining",
    "parked",
    "stopped",
    "failed",
]


@dataclass(frozen=True)
class Seat:
    """Where and as whom a shell runs; the same for every incarnation."""

    name: str
    membership: Membership
    host: str | None = None  # address the link listens on; None: this node's
    num_threads: int = 1
    namespace: str = "dspark"
    rank: int = 0  # of a target: its number in the cluster
    telemetry: TelemetryConfig | None = None  # where traces go


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter that ranks may use."""

    endpoint: Endpoint
    spec: DrafterSpec
    draft_times: tuple[tuple[int, float], ...]  # (requests, measured seconds)


@dataclass(frozen=True)
class Peers:
    """Everybody a shell may talk to, as of one version of the supervisor's routing table."""

    version: int
    ranks: tuple[Endpoint, ...] = ()
    drafters: tuple[DrafterFacts, ...] = ()  # of a rank: only those assigned to it
    allocator: Endpoint | None = None
    order: PolicyOrder | None = None  # None: the policy of the configuration
    assignment: Assignment | None = None  # None: everybody runs what the cluster was started with
    is_drained: bool = False  # of a rank: it takes no new streams


@dataclass(frozen=True)
class Description:
    """What a shell says about itself at any time."""

    name: str
    role: Role
    phase: Phase
    detail: str
    endpoint: Endpoint | None
    spec: TargetSpec | DrafterSpec | None
    draft_times: tuple[tuple[int, float], ...]
    peers_version: int
    turn_age_s: float  # since the loop last came round; grows while one step is computed
    pid: int
    node_ip: str
    warning: str = ""  # a promise that does not hold here
    integrity_problems: tuple[str, ...] = ()  # of the last check of an idle rank
    offer: str = ""  # host:port of the store of a process that waits to be put into a group
    waited_s: float = 0.0  # in a collective of its group: how long others have held it up
    order: PolicyOrder | None = None  # the policy it was last told
    assignment: Assignment | None = None  # that it was last told
    revision: int = FIRST  # of the settings it was started with
    memory_bytes: int = 0  # of its process, resident
