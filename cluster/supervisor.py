"""The actor that keeps the desired state: it watches every part, and tells all others when one has changed.

Ray restarts a process that ended; the supervisor notices, learns the new endpoint and publishes it. It kills a
process whose loop stands still, so that Ray restarts that one too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from actors.core.lockstep import GroupBook
from actors.core.messages import RoutingTable
from actors.link import Membership, Role
from actors.shell import Phase
from cluster.routing import Member, RouteBook
from configs.change import PolicyOrder, policy_change
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 2.0
HANG_AFTER_S = 120.0  # the longest step of a large model, with room
STATS_TIMEOUT_S = 10.0
_ALONE: tuple[Phase, ...] = ("starting", "loading", "stopped", "failed")  # holds up nobody
OBSERVE_TIMEOUT_S = 2.0  # whoever looks prefers an older number to a late one
FRONT_FORGOTTEN_S = 30.0  # a silent ingress replica's counters are not told any more


class Supervisor:
    """Named "supervisor"; one for the cluster.

    Args:
        members: (name, role) of every actor to watch.
        membership: handed to whoever joins the cluster's links.
        host: address links listen on; None: each node's own.
        namespace: where the actors are named.
        config: what the cluster was started with.
        hang_after_s: a loop that has not come round for so long stands still, and its process is ended.
        groups: names of the ranks that step together, rank 0 of each first.
        silent_after_s: a rank of a group that has not answered for so long holds up the others, and is ended.
        about: what is deployed, for whoever finds this supervisor by its name.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, Role]],
        membership: Membership,
        host: str | None,
        namespace: str,
        config: ClusterConfig,
        hang_after_s: float = HANG_AFTER_S,
        groups: Sequence[tuple[str, ...]] = (),
        silent_after_s: float = HANG_AFTER_S,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        # A later incarnation starts above every version of an earlier one.
        first = int(time.time())
        self._book = RouteBook(members, first_version=first)
        self._groups = [GroupBook(tuple(names), epoch=first) for names in groups]
        self._silent_after_s = silent_after_s
        self._about = dict(about or {})
        self._heard_at: dict[str, float] = {}
        self._membership = membership
        self._host = host
        self._namespace = namespace
        self._config = config
        self._hang_after_s = hang_after_s
        self._handles: dict[str, Any] = {}
        self._watching: asyncio.Task[None] | None = None
        self._num_killed = 0
        self._fronts: dict[str, tuple[float, dict[str, Any]]] = {}
        self._has_asked = asyncio.Event()

    async def routing(self, seen: int = -1) -> RoutingTable:
        """The current table, above the one `seen`; the ingress polls it. The first waits until all were asked once."""
        self._watch()
        await self._has_asked.wait()
        self._book.outrun(seen)
        return self._book.table()

    async def join(self) -> tuple[Membership, str | None]:
        """Keys and listening address for a process that opens a link of its own."""
        return self._membership, self._host

    async def deployment(self) -> dict[str, Any]:
        """What was deployed (`cluster.deployment.Deployment`)."""
        return self._about

    async def status(self) -> dict[str, Any]:
        """Every member: state, reason, restarts, process."""
        self._watch()
        return {
            "version": self._book.version,
            "policy": (self._book.order or PolicyOrder(0, self._config.policy)).policy.name,
            "num_killed": self._num_killed,
            "is_settled": not self._book.behind(),
            "members": [_status(member) for member in self._book.members.values()],
        }

    async def reconfigure(self, wanted: ClusterConfig) -> dict[str, Any]:
        """Change the verification policy of the running cluster, for every rank from its next step on.

        Streams go on; what was planned under the last policy is never applied under this one. Members that do not
        answer now, or start later, are told as soon as they can be.

        Returns:
            "number" of the order, and by name whether a member has taken it over ("told") or not yet ("late").

        Raises:
            FixedSettingError: `wanted` differs in something else than the policy, and nothing was changed.
        """
        self._watch()
        await self._has_asked.wait()  # orders of an earlier supervisor are known then
        order = self._book.command(policy_change(self._config, wanted))
        log.info("policy %s, order %d", order.policy.name, order.number)
        members = [member for member in self._usable if member.role != "drafter"]
        took = await asyncio.gather(*(self._tell(member) for member in members))
        told = {member.name: ok for member, ok in zip(members, took, strict=True)}
        return {
            "number": order.number,
            "told": [name for name, ok in told.items() if ok],
            "late": [name for name, ok in told.items() if not ok],
        }

    async def stats(self) -> dict[str, Any]:
        """The counters of every member that answers."""
        return await self._ask_all(self._usable, "stats", STATS_TIMEOUT_S)

    async def explain(self, response_id: str) -> dict[str, Any]:
        """What every rank says of a response's rounds; {"error": ...} for one that does not answer."""
        ranks = [member for member in self._usable if member.role == "target"]
        return await self._ask_all(ranks, "explain", STATS_TIMEOUT_S, response_id)

    async def publish(self, ingress: str, front: dict[str, Any]) -> None:
        """An ingress replica's counters, for whichever replica is asked about the cluster."""
        self._fronts[ingress] = time.monotonic(), front

    async def observe(self, ingress: str, front: dict[str, Any]) -> dict[str, Any]:
        """Everything the metrics and the live page show; the caller leaves its own counters here."""
        await self.publish(ingress, front)
        status = await self.status()
        stats = await self._ask_all(self._usable, "stats", OBSERVE_TIMEOUT_S)
        oldest = time.monotonic() - FRONT_FORGOTTEN_S
        self._fronts = {n: heard for n, heard in self._fronts.items() if heard[0] >= oldest}
        return {
            "members": status["members"],
            "num_killed": status["num_killed"],
            "stats": stats,
            "fronts": {name: counters for name, (_, counters) in self._fronts.items()},
        }

    @property
    def _usable(self) -> list[Member]:
        return [member for member in self._book.members.values() if member.is_usable]

    async def _ask_all(
        self, members: Sequence[Member], method: str, timeout_s: float, *arguments: Any
    ) -> dict[str, Any]:
        names = [member.name for member in members]
        asked = (self._ask(name, method, timeout_s, *arguments) for name in names)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            name: {"error": repr(answer)} if isinstance(answer, BaseException) else answer
            for name, answer in zip(names, answers, strict=True)
        }

    async def report_failure(self, name: str, cause: str) -> None:
        """A member says why its process ends."""
        log.error("%s ends: %s", name, cause)
        self._book.blame(name, cause)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Begin with the first call: only then there is a running loop."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                try:
                    await asyncio.gather(*(self._ping(m) for m in self._book.members.values()))
                finally:
                    self._has_asked.set()
                await asyncio.gather(*(self._tell(m) for m in self._book.behind()))
                await asyncio.gather(*(self._care_for(group) for group in self._groups))
            except Exception:
                log.exception("a round of the supervisor failed")
            await asyncio.sleep(max(0.0, started + PING_INTERVAL_S - time.monotonic()))

    async def _ping(self, member: Member) -> None:
        try:
            description = await self._ask(member.name, "describe", PING_TIMEOUT_S)
        except (ActorDiedError, ActorUnavailableError) as error:
            self._book.miss(member.name, f"its process ended: {_first_line(error)}", has_ended=True)
        except ValueError:
            self._book.miss(
                member.name, "there is no such actor", has_ended=member.last is not None
            )
        except (TimeoutError, RayError) as error:
            self._book.miss(member.name, f"does not answer: {_first_line(error)}", has_ended=False)
        else:
            self._book.hear(description)
            self._heard_at[member.name] = time.monotonic()
            if member.is_usable and description.turn_age_s > self._hang_after_s:
                self._kill(member, f"its loop stood still for {description.turn_age_s:.0f} s")

    async def _care_for(self, group: GroupBook) -> None:
        """Put a group together as soon as all its ranks wait for that; end a rank that holds up the others."""
        members = [self._book.members[name] for name in group.members]
        formations = group.form([_offer(member) for member in members])
        if formations is not None:
            log.info("group %s is formed, epoch %d", ", ".join(group.members), formations[0].epoch)
            calls = [
                self._ask(member.name, "form", PING_TIMEOUT_S, formation)
                for member, formation in zip(members, formations, strict=True)
            ]
            for member, answer in zip(
                members, await asyncio.gather(*calls, return_exceptions=True), strict=True
            ):
                if isinstance(answer, BaseException):
                    log.warning("%s was not told of its group: %r", member.name, answer)
        silent_s = [self._silent_s(member) for member in members]
        for name in group.held_up(silent_s, self._silent_after_s):
            del self._heard_at[name]  # the next process has its own time
            cause = f"it held up its group for {self._silent_after_s:g} s"
            self._kill(self._book.members[name], cause)

    def _silent_s(self, member: Member) -> float | None:
        """Seconds since a rank that steps with others last answered."""
        heard_at = self._heard_at.get(member.name)
        if member.last is None or heard_at is None or member.last.phase in _ALONE:
            return None
        return time.monotonic() - heard_at

    def _kill(self, member: Member, cause: str) -> None:
        log.error("%s: %s; Ray starts it again", member.name, cause)
        self._book.blame(member.name, cause)
        self._num_killed += 1
        ray.kill(self._handles[member.name], no_restart=False)

    async def _tell(self, member: Member) -> bool:
        """Whether it has taken over the current version."""
        try:
            await self._ask(
                member.name, "connect", PING_TIMEOUT_S, self._book.peers_of(member.name)
            )
        except (TimeoutError, RayError) as error:
            log.warning("%s was not told of version %d: %r", member.name, self._book.version, error)
            return False
        return True

    async def _ask(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = ray.get_actor(name, namespace=self._namespace)
        return await asyncio.wait_for(getattr(handle, method).remote(*arguments), timeout_s)


def _offer(member: Member) -> tuple[str, str] | None:
    """(incarnation, address of its store) of a rank that waits to be put into its group."""
    last = member.last
    if last is None or last.phase != "forming" or not last.offer or member.num_misses:
        return None
    return member.endpoint.epoch, last.offer


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _status(member: Member) -> dict[str, Any]:
    last = member.last
    return {
        "name": member.name,
        "role": member.role,
        "state": member.state,
        "reason": member.reason,
        "num_restarts": member.num_restarts,
        "last_failure": member.last_failure,
        "phase": last.phase if last else "starting",
        "detail": last.detail if last else "",
        "waited_s": last.waited_s if last else 0.0,
        "pid": last.pid if last else 0,
        "node_ip": last.node_ip if last else "",
        "spec": asdict(last.spec) if last and last.spec else None,
    }
