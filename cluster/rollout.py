"""The supervisor's hands in a rollout: what it sees of the members, and how it holds, moves and restarts them.

What to do and when is decided by `actors.core.rollout`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.core.rollout import Action, Rollout, Sight, Step
from actors.core.rollout_plan import Bounds, Unit, members_with, require_somebody_left, units_of
from actors.engine.base import TargetSpec
from actors.peers import Description
from cluster.routing import Member, RouteBook
from cluster.sight import sight_of
from configs.change import at_run_time, require_rollable, restarted_by
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0  # for an orderly end of a process, before it is ended
LOOK_TIMEOUT_S = 2.0

Ask = Callable[..., Awaitable[Any]]


class RolloutError(RuntimeError):
    """A rollout, or a drain, cannot begin now; says what to do."""


@dataclass(frozen=True)
class Wish:
    """What is to be rolled out.

    Attributes:
        config: the settings all members shall come to.
        taps: the target's layers that the drafter of `config` reads; None: those of the present one.
        bounds: how long what may take.
    """

    config: ClusterConfig
    taps: tuple[int, ...] | None
    bounds: Bounds


class RolloutDesk:
    """At most one rollout at a time.

    Args:
        book: what is known of the members, and what is wanted of them.
        groups: names of the ranks that step together.
        ask: the supervisor's way to call a member: name, method, timeout in seconds, arguments.
        kill: ends a member's process, so that Ray starts it again.
        tell: has every member hear what has changed, now: what a supervisor alone knows ends with it.
    """

    def __init__(
        self,
        book: RouteBook,
        groups: Sequence[tuple[str, ...]],
        ask: Ask,
        kill: Callable[[str], None],
        tell: Callable[[], Awaitable[None]],
    ) -> None:
        self._book = book
        self._groups = groups
        self._ask = ask
        self._kill = kill
        self._tell = tell
        self._rollout: Rollout | None = None
        self._asked: Rollout | None = None  # the last that `begin` made, not `scale`
        self._number = 0
        self._settles = self._is_settled = True  # all members come to one revision, and have
        self._order = book.order  # the last policy order before it began
        self._restarts: set[asyncio.Task[None]] = set()
        self._ended: set[tuple[str, int]] = set()  # (member, process) that was told to stop

    async def begin(self, wish: Wish) -> dict[str, Any]:
        """Start it; see `progress`.

        Raises:
            RolloutError: another one is under way.
            FixedSettingError: a setting cannot be rolled out; nothing was changed.
            NobodyLeftError: nobody would serve meanwhile.
        """
        if self.is_busy:
            raise RolloutError(
                "a rollout is under way; wait for its end, or stop it with Ctrl-C there"
                if self._rollout is self._asked
                else "autoscale parks or starts a rank just now; try again when `dspark status` shows that it has"
            )
        assignment = self._book.assignment
        for config in assignment.revisions.values():
            require_rollable(config, wish.config)
        due = [m for m in self._book.members.values() if self._is_due(m, wish)]
        due = [m for m in due if m.state != "parked"]  # they start with what is current then
        drafters = [m.name for m in due if m.role == "drafter"]
        units = units_of(drafters, [m.name for m in due if m.role == "target"], self._groups)
        require_somebody_left(units, self._open_ranks, wish.bounds)
        assignment, self._number = assignment.propose(wish.config)
        self._book.assign(assignment)
        rollout = Rollout(units, self._number, self._numbers(), wish.bounds)
        self._rollout = self._asked = rollout
        self._order = self._book.order
        self._settles, self._is_settled = True, False
        log.info(
            "rollout of revision %d: %s", self._number, [u.members for u in units] or "at once"
        )
        if not units:
            await self._settle(wish.config)
        return self.progress()

    @property
    def is_busy(self) -> bool:
        return self._rollout is not None and self._rollout.is_running

    def _numbers(self) -> dict[str, int]:
        return {name: self._book.assignment.number_of(name) for name in self._book.members}

    def scale(self, members: tuple[str, ...], *, is_parked: bool, bounds: Bounds) -> Rollout:
        """Park these ranks when their streams have gone, or start them again; a rollout of them alone."""
        assert not self.is_busy
        current = self._book.assignment.current
        number, unit = -current if is_parked else current, Unit(members, "target")
        self._number, self._settles = current, False
        self._rollout = Rollout([unit], number, self._numbers(), bounds)
        return self._rollout

    def _is_due(self, member: Member, wish: Wish) -> bool:
        """Whether it must start again to run that configuration."""
        spec = member.last.spec if member.last else None
        other_taps = (
            wish.taps is not None
            and isinstance(spec, TargetSpec)
            and spec.tap_layer_ids != wish.taps
        )
        return member.role in restarted_by(self._runs(member), wish.config, other_taps=other_taps)

    def _runs(self, member: Member) -> ClusterConfig:
        """The settings of its process; a supervisor may have ended between assigning others and the restart."""
        assignment, last = self._book.assignment, member.last
        number = assignment.number_of(member.name)
        if last is not None and member.name in assignment.numbers and last.revision != number:
            # Older than all that are kept: then the current one changed nothing for it.
            number = last.revision
        return assignment.revisions.get(abs(number), assignment.config)

    def stop(self) -> None:
        """End after the unit whose turn it is."""
        if self._asked is not None:
            self._asked.is_stopping = True

    def progress(self) -> dict[str, Any]:
        """How far it is, JSON-able; "none" where this supervisor has begun none."""
        rollout, now = self._asked, time.monotonic()
        if rollout is None:
            return {"outcome": "none", "reason": "", "revision": 0, "steps": []}
        is_over = rollout.outcome != "done" or self._is_settled
        return {
            "outcome": rollout.outcome if is_over else "running",
            "reason": rollout.reason,
            "revision": abs(rollout.wanted),
            "steps": [_step(step, now) for step in rollout.steps],
        }

    def has_ended(self, said: Description) -> bool:
        """Whether this process was told to stop, and its end is under way."""
        return (said.name, said.pid) in self._ended

    # --- a round of the supervisor ----------------------------------------------------------------------------------

    async def advance(self) -> None:
        """Look, decide, do."""
        rollout = self._rollout
        if rollout is None or not rollout.is_running:
            return
        sights = await self._look(rollout)
        for action in rollout.advance(sights, time.monotonic()):
            await self._perform(rollout, action)
        await self._conclude(rollout)

    async def _conclude(self, rollout: Rollout) -> None:
        if rollout.outcome == "done" and self._settles:
            await self._settle(self._book.assignment.revisions[self._number])
        elif rollout.outcome in ("failed", "stopped"):
            log.error("the rollout of revision %d has ended: %s", self._number, rollout.reason)

    async def _settle(self, config: ClusterConfig) -> None:
        policy = config.policy
        if self._book.order != self._order:  # a policy that was ordered meanwhile stays
            policy = at_run_time(policy, self._book.policy)
        is_new_policy = policy != self._book.policy
        self._book.assign(self._book.assignment.settle(self._number))
        if is_new_policy:
            self._book.command(policy)
        await self._tell()
        self._is_settled = True

    async def _look(self, rollout: Rollout) -> dict[str, Sight]:
        members = [m for m in self._book.members.values() if m.role != "allocator"]
        # Counts are wanted of ranks only, and only while one drains.
        is_draining = any(step.phase == "draining" for step in rollout.steps)
        asked = [m for m in members if m.role == "target" and m.is_usable and is_draining]
        calls = (self._ask(m.name, "stats", LOOK_TIMEOUT_S) for m in asked)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        stats = {m.name: a for m, a in zip(asked, answers, strict=True) if isinstance(a, dict)}
        return {m.name: sight_of(m, self._book, stats.get(m.name)) for m in members}

    async def _perform(self, rollout: Rollout, action: Action) -> None:
        book, names = self._book, action.members
        match action.kind:
            case "hold" | "free":
                ranks = [name for name in names if book.members[name].role == "target"]
                book.hold(ranks, is_held=action.kind == "hold")
            case "assign":
                for name in names:  # what it says from now on is of the new one
                    book.members[name].last_failure = ""
                book.assign(book.assignment.give(names, action.revision))
                await self._tell()
            case "move":
                calls = (self._ask(name, "move_streams", STOP_TIMEOUT_S) for name in names)
                for name, answer in zip(
                    names, await asyncio.gather(*calls, return_exceptions=True), strict=True
                ):
                    if isinstance(answer, BaseException):
                        log.warning("%s could not give up its streams: %r", name, answer)
                    else:
                        rollout.moved(answer)
            case "restart":
                # Beside the rounds: an orderly end may take a while.
                restart = asyncio.get_running_loop().create_task(self._restart(names))
                self._restarts.add(restart)
                restart.add_done_callback(self._restarts.discard)

    async def _restart(self, names: Sequence[str]) -> None:
        known = {name: self._book.members[name].last for name in names}
        self._ended |= {(name, last.pid) for name, last in known.items() if last}
        calls = (self._ask(name, "stop", STOP_TIMEOUT_S) for name in names)
        for name, answer in zip(
            names, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, BaseException):
                log.warning("%s did not end in order: %r", name, answer)
            self._book.members[name].last_failure = ""
            try:
                self._kill(name)
            except ray.exceptions.RayError as error:  # it is starting again already
                log.warning("%s could not be ended: %s", name, error)

    # --- draining by order ------------------------------------------------------------------------------------------

    async def drain(self, name: str, *, is_drained: bool) -> list[str]:
        """Send nothing new to this rank, or again; of a group to all. Returns whom it concerns.

        Raises:
            RolloutError: there is no such rank, or nobody would be left.
        """
        ranks = [member.name for member in self._ranks]
        if name not in ranks:
            raise RolloutError(f"there is no rank {name!r}: there are {', '.join(ranks)}")
        members = members_with(name, self._groups)
        left = self._open_ranks - {*members}
        if is_drained and not left:
            raise RolloutError(
                f"no other rank would take streams than {' and '.join(members)}: the others are drained or parked; "
                "`dspark undrain` one first, or raise autoscale.min_ranks"
            )
        self._book.assign(self._book.assignment.drain(members, is_drained=is_drained))
        await self._tell()
        return list(members)

    @property
    def _open_ranks(self) -> set[str]:
        """Those that take streams, or will when they are up."""
        return {
            m.name for m in self._ranks if m.state != "parked" and not self._book.is_drained(m.name)
        }

    @property
    def _ranks(self) -> list[Member]:
        return [member for member in self._book.members.values() if member.role == "target"]


def _step(step: Step, now: float) -> dict[str, Any]:
    end_s = now if step.ended_s is None else step.ended_s
    return {
        "members": list(step.unit.members),
        "role": step.unit.role,
        "phase": step.phase,
        "note": step.note,
        "moved_streams": step.num_moved,
        "seconds": 0.0 if step.began_s is None else end_s - step.began_s,
    }
