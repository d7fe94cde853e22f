"""What the supervisor knows of every part of the cluster, and the tables it makes of that. No Ray, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from actors.core.messages import Endpoint, RankRoute, RoutingTable
from actors.engine.base import DrafterSpec, TargetSpec
from actors.link import Role
from actors.peers import Description, DrafterFacts, Peers, Phase
from configs.change import PolicyOrder
from configs.policy import PolicyConfig
from configs.revisions import Assignment

T = TypeVar("T")
State = Literal["starting", "ready", "draining", "parked", "dead"]

_STATE_OF: dict[Phase, State] = {
    "starting": "starting",
    "loading": "starting",
    "forming": "starting",
    "measuring": "starting",
    "proving": "starting",
    "ready": "ready",
    "draining": "draining",
    "parked": "parked",
    "stopped": "dead",
    "failed": "dead",
}
SLOW_COLLECTIVE_S = 2.0  # worth a word; how long is too long the rank itself decides
MISSES_UNTIL_DEAD = 3  # silent pings; a call that fails because the process ended counts at once
MISSES_WHILE_STARTING = (
    30  # imports and weights keep a process from answering, on a busy machine for long
)


@dataclass
class Member:
    """One named actor of the cluster."""

    name: str
    role: Role
    state: State = "starting"
    reason: str = "not heard of yet"
    last: Description | None = None
    num_misses: int = 0
    num_restarts: int = 0
    last_failure: str = ""
    revision: int = 0  # of the settings it shall run
    heard_at_s: float | None = None  # on the supervisor's clock

    @property
    def is_usable(self) -> bool:
        return self.state in ("ready", "draining") and self.last is not None

    @property
    def endpoint(self) -> Endpoint:
        if self.last is None or self.last.endpoint is None:
            return Endpoint(self.name, self.role, "", "", "")
        return self.last.endpoint

    @property
    def route(self) -> RankRoute:
        said = (self.last.warning, self.last.integrity_problems) if self.last else ("", ())
        return RankRoute(self.endpoint, self.state, self.reason, *said, self.revision)

    @property
    def offer(self) -> tuple[str, str] | None:
        """(incarnation, address of its store) of a rank that waits to be put into its group."""
        last = self.last
        if last is None or last.phase != "forming" or not last.offer or self.num_misses:
            return None
        return self.endpoint.epoch, last.offer

    def describe(self) -> dict[str, Any]:
        """For `Supervisor.status`."""
        last = self.last
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "reason": self.reason,
            "revision": self.revision,
            "num_restarts": self.num_restarts,
            "last_failure": self.last_failure,
            "phase": last.phase if last else "starting",
            "detail": last.detail if last else "",
            "waited_s": last.waited_s if last else 0.0,
            "pid": last.pid if last else 0,
            "node_ip": last.node_ip if last else "",
            "memory_bytes": last.memory_bytes if last else 0,
            "spec": asdict(last.spec) if last and last.spec else None,
        }


def _patience(member: Member) -> int:
    return MISSES_WHILE_STARTING if member.state == "starting" else MISSES_UNTIL_DEAD


class RouteBook:
    """Hears of every member and keeps a version that rises whenever something changes for the others.

    Args:
        members: (name, role) of all actors that should exist.
        first_version: higher than any a predecessor can have published.
        assignment: what they were started with.
    """

    def __init__(
        self, members: Sequence[tuple[str, Role]], first_version: int, assignment: Assignment
    ) -> None:
        self.members = {name: Member(name, role) for name, role in members}
        self.version = first_version
        self.order: PolicyOrder | None = None
        self.assignment = assignment
        self.held: frozenset[str] = frozenset()  # of a rollout: they take no new streams meanwhile
        self._number_members()
        self._seen = self._snapshot()

    def assign(self, assignment: Assignment) -> None:
        """From now on this is wanted of the members; all are told."""
        self.version += 1
        self.assignment = replace(assignment, version=self.version)
        self._number_members()
        self._look_again()

    def hold(self, names: Iterable[str], *, is_held: bool) -> None:
        """These members shall take nothing new, or shall again unless an operator has drained them."""
        named = frozenset(names)
        self.held = self.held | named if is_held else self.held - named
        self.version += 1
        self._look_again()

    def is_drained(self, name: str) -> bool:
        return name in self.held or name in self.assignment.drained

    def _look_again(self) -> None:
        for member in self.members.values():
            if member.is_usable and member.last is not None:
                member.state = self._state(member.name, member.last.phase)
        self._notice()

    def _state(self, name: str, phase: Phase) -> State:
        state = _STATE_OF[phase]
        # It may not know yet; streams shall not go there all the same.
        return "draining" if state == "ready" and self.is_drained(name) else state

    def outrun(self, version: int) -> None:
        """Somebody knows a higher version, of a supervisor before this one: the clock that the first version comes
        from was set back, or that supervisor had much to tell in a short life."""
        if version > self.version:
            self.version = version + 1

    @property
    def policy(self) -> PolicyConfig:
        """What ranks and the allocator follow."""
        return (self.order or self.assignment.config).policy

    def command(self, policy: PolicyConfig) -> PolicyOrder:
        """Everybody shall follow this policy; whoever starts again is told of it too."""
        self.version += 1
        self.order = PolicyOrder(self.version, policy)
        return self.order

    def hear(self, description: Description) -> None:
        """A member has answered."""
        member = self.members[description.name]
        last = member.last
        if last is not None and last.pid != description.pid:
            member.num_restarts += 1
        member.last = description
        member.num_misses = 0
        self.outrun(description.peers_version)
        member.state = self._state(member.name, description.phase)
        member.reason = ""
        if member.state in ("starting", "dead"):
            member.reason = f"{description.phase} {description.detail}".strip()
        elif description.waited_s > SLOW_COLLECTIVE_S:
            member.reason = f"its group has kept it waiting for {description.waited_s:.0f} s"
        if description.phase == "failed":
            member.last_failure = description.detail
        order = description.order
        if order is not None and (self.order is None or order.number > self.order.number):
            self.order = order  # of the supervisor before this one
            self.version += 1
        wish = description.assignment
        if wish is not None and wish.version > self.assignment.version:
            self.assignment = wish
            self._number_members()
        self._notice()

    def miss(self, name: str, reason: str, has_ended: bool) -> None:
        """A member did not answer; `has_ended`: because its process is gone, not because it was slow."""
        member = self.members[name]
        member.num_misses += 1
        if member.last is None and not has_ended:
            member.reason = reason  # it may still wait for a place
        elif has_ended or member.num_misses >= _patience(member):
            member.state = "dead"
            member.reason = member.last_failure or reason
        self._notice()

    def blame(self, name: str, cause: str) -> None:
        """A member says why it ends."""
        self.members[name].last_failure = cause

    def table(self) -> RoutingTable:
        """What the ingress polls."""
        specs = [m.last.spec for m in self._of("target") if m.is_usable and m.last]
        lengths = [spec.max_model_len for spec in specs if isinstance(spec, TargetSpec)]
        return RoutingTable(
            version=self.version,
            ranks=tuple(m.route for m in self._of("target")),
            allocator=self._allocator(),
            max_model_len=min(lengths, default=0),
            others=tuple(m.route for m in self.members.values() if m.role != "target"),
            num_places=sum(
                self.assignment.of(m.name).config.target.max_running for m in self._of("target")
            ),
        )

    def peers_of(self, name: str) -> Peers:
        """Whom this member may talk to."""
        member = self.members[name]
        drafters: tuple[DrafterFacts, ...] = ()
        if member.role == "target":
            ranks = self._of("target")
            drafters = assigned(
                ranks.index(member), len(ranks), [_facts(m) for m in self._of("drafter")]
            )
        return Peers(
            version=self.version,
            ranks=tuple(m.endpoint for m in self._of("target") if m.is_usable),
            drafters=drafters,
            allocator=self._allocator(),
            order=self.order,
            assignment=self.assignment if self.assignment.version else None,
            is_drained=member.role == "target" and self.is_drained(name),
        )

    @property
    def usable(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_usable]

    def behind(self) -> list[Member]:
        """Members that can be told about the current version and have not taken it over."""
        return [
            m
            for m in self.members.values()
            if m.is_usable and m.last is not None and m.last.peers_version != self.version
        ]

    def _of(self, role: Role) -> list[Member]:
        return [member for member in self.members.values() if member.role == role]

    def _allocator(self) -> Endpoint | None:
        return next((m.endpoint for m in self._of("allocator") if m.is_usable), None)

    def _number_members(self) -> None:
        for member in self.members.values():
            member.revision = abs(self.assignment.number_of(member.name))

    def _snapshot(self) -> list[tuple[State, Endpoint, str, tuple[str, ...], int]]:
        routes = [member.route for member in self.members.values()]
        return [(r.state, r.endpoint, r.warning, r.integrity_problems, r.revision) for r in routes]

    def _notice(self) -> None:
        snapshot = self._snapshot()
        if snapshot != self._seen:
            self._seen = snapshot
            self.version += 1


def assigned(index: int, num_ranks: int, drafters: Sequence[T | None]) -> tuple[T, ...]:
    """The drafters of rank `index`, spread evenly; a rank whose own are all gone (None) borrows one.

    With more drafters than ranks a rank has several, with fewer it shares one.
    """
    own = [index % len(drafters)] if drafters else []
    if len(drafters) > num_ranks:
        own = list(range(index, len(drafters), num_ranks))
    alive = tuple(drafter for i in own if (drafter := drafters[i]) is not None)
    if alive:
        return alive
    others = [drafter for drafter in drafters if drafter is not None]
    return (others[index % len(others)],) if others else ()


def _facts(member: Member) -> DrafterFacts | None:
    last = member.last
    if member.state != "ready" or last is None or not isinstance(last.spec, DrafterSpec):
        return None
    return DrafterFacts(member.endpoint, last.spec, last.draft_times)
