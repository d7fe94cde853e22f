"""The actor that keeps the desired state: it watches every part, and tells all others when one has changed.

Ray restarts a process that ended; the supervisor notices, learns the new endpoint and publishes it. It kills a
process whose loop stands still, so that Ray restarts that one too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from actors.core.lockstep import GroupBook
from actors.core.messages import RoutingTable
from actors.link import Membership, Role
from cluster.autoscaler import AutoscaleDesk
from cluster.group_care import GroupCare
from cluster.rollout import RolloutDesk, Wish
from cluster.routing import Member, RouteBook
from cluster.telemetry import FrontShelf
from configs.change import policy_change
from configs.revisions import Assignment, Revision
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 2.0
HANG_AFTER_S = 120.0  # the longest step of a large model, with room
STATS_TIMEOUT_S = 10.0
OBSERVE_TIMEOUT_S = 2.0  # whoever looks prefers an older number to a late one


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
        about: Mapping[str, Any] | None = None,
    ) -> None:
        # A later incarnation starts above every version of an earlier one.
        first = int(time.time())
        self._book = RouteBook(members, first, Assignment.first(config))
        self._groups = [
            GroupCare(GroupBook(tuple(names), first), self._book, self._ask, self._kill)
            for names in groups
        ]
        self._about = dict(about or {})
        self._membership = membership
        self._host = host
        self._namespace = namespace
        self._hang_after_s = hang_after_s
        self._handles: dict[str, Any] = {}
        self._desk = RolloutDesk(self._book, groups, self._ask, self._end, self._tell_all)
        self._scaling = AutoscaleDesk(self._book, self._desk, groups, self._ask)
        self._watching: asyncio.Task[None] | None = None
        self._num_killed = 0
        self._fronts = FrontShelf()
        self._ingress: dict[str, Any] | None = None  # what was decided last of its replicas
        self._has_asked = asyncio.Event()

    async def routing(self, seen: int = -1) -> RoutingTable:
        """The current table, above the one `seen`; the ingress polls it. The first waits until all were asked once."""
        self._watch()
        await self._has_asked.wait()
        self._book.outrun(seen)
        ingress = self._book.assignment.config.ingress
        heard = len(self._fronts.known(time.monotonic()))
        num_ingress = min(max(heard, ingress.num_replicas), ingress.most_replicas)
        return replace(self._book.table(), num_ingress=num_ingress)

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
            "policy": self._book.policy.name,
            "num_killed": self._num_killed,
            "is_settled": not self._book.behind(),
            "revision": self._book.assignment.current,
            "autoscale": asdict(self._scaling.last) if self._scaling.last else None,
            "ingress": self._ingress,
            "members": [member.describe() for member in self._book.members.values()],
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
        order = self._book.command(policy_change(self._book.assignment.config, wanted))
        log.info("policy %s, order %d", order.policy.name, order.number)
        members = [member for member in self._book.usable if member.role != "drafter"]
        took = await asyncio.gather(*(self._tell(member) for member in members))
        told = {member.name: ok for member, ok in zip(members, took, strict=True)}
        return {
            "number": order.number,
            "told": [name for name, ok in told.items() if ok],
            "late": [name for name, ok in told.items() if not ok],
        }

    async def settings(self) -> dict[str, Any]:
        """The configuration that all members have come to, with the policy they follow now."""
        config = self._book.assignment.config.model_copy(update={"policy": self._book.policy})
        return config.model_dump(mode="json")

    async def revision_of(self, name: str) -> Revision:
        """What a member that starts again shall run."""
        self._watch()
        await self._has_asked.wait()  # what an earlier supervisor has wanted is known then
        return self._book.assignment.of(name)

    async def rollout(self, wish: Wish) -> dict[str, Any]:
        """Begin a rolling update; see `RolloutDesk.begin`."""
        self._watch()
        await self._has_asked.wait()
        return await self._desk.begin(wish)

    async def rollout_progress(self) -> dict[str, Any]:
        """See `RolloutDesk.progress`."""
        return self._desk.progress()

    async def stop_rollout(self) -> None:
        """End it after the member whose turn it is."""
        self._desk.stop()

    async def drain(self, name: str, is_drained: bool) -> list[str]:
        """See `RolloutDesk.drain`."""
        self._watch()
        await self._has_asked.wait()
        return await self._desk.drain(name, is_drained=is_drained)

    async def stats(self) -> dict[str, Any]:
        """The counters of every member that answers."""
        return await self._ask_all(self._book.usable, "stats", STATS_TIMEOUT_S)

    async def explain(self, response_id: str) -> dict[str, Any]:
        """What every rank says of a response's rounds; {"error": ...} for one that does not answer."""
        ranks = [member for member in self._book.usable if member.role == "target"]
        return await self._ask_all(ranks, "explain", STATS_TIMEOUT_S, response_id)

    async def publish(self, ingress: str, front: dict[str, Any]) -> None:
        """An ingress replica's counters, for whichever replica is asked about the cluster."""
        self._fronts.note(ingress, front, time.monotonic())

    async def note_ingress(self, decision: dict[str, Any]) -> None:
        """How many ingress replicas shall serve, and why; see `cluster.ingress_scaling`."""
        if self._ingress is None or decision["num_replicas"] != self._ingress["num_replicas"]:
            log.warning("ingress replicas: %(num_replicas)d: %(why)s", decision)
        self._ingress = decision

    async def observe(self, ingress: str, front: dict[str, Any]) -> dict[str, Any]:
        """Everything the metrics and the live page show; the caller leaves its own counters here."""
        await self.publish(ingress, front)
        status = await self.status()
        stats = await self._ask_all(self._book.usable, "stats", OBSERVE_TIMEOUT_S)
        return {
            "members": status["members"],
            "num_killed": status["num_killed"],
            "stats": stats,
            "fronts": self._fronts.known(time.monotonic()),
        }

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
                await self._tell_all()
                await asyncio.gather(*(care.look() for care in self._groups))
                await self._desk.advance()
                await self._scaling.look()
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
            member.heard_at_s = time.monotonic()
            if member.is_usable and description.turn_age_s > self._hang_after_s:
                self._kill(member, f"its loop stood still for {description.turn_age_s:.0f} s")
            if description.phase == "stopped" and not self._desk.has_ended(description):
                self._kill(member, "it was stopped, by a supervisor that is no more")

    def _kill(self, member: Member, cause: str) -> None:
        log.error("%s: %s; Ray starts it again", member.name, cause)
        self._book.blame(member.name, cause)
        self._num_killed += 1
        self._end(member.name)

    def _end(self, name: str) -> None:
        """End its process; Ray starts it again."""
        ray.kill(self._handles[name], no_restart=False)

    async def _tell_all(self) -> None:
        await asyncio.gather(*(self._tell(member) for member in self._book.behind()))

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


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
