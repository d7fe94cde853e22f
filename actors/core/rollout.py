"""A rolling update as a state machine: who restarts when, when streams move, when to go back. No clock, no I/O.

The supervisor looks at the members about twice a second and does what is said here:

    for action in rollout.advance(sights, now): perform(action)

One unit (a drafter, a rank, a group of ranks) at a time: it is held (nothing new goes there), its streams end or move
to others, its processes start again with the new revision, it is ready (a rank has then served a token), it is let go.
A unit that does not come up gets its old revision back, and the rollout ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.core.rollout_plan import Bounds, Unit

Phase = Literal[
    "waiting",
    "draining",
    "restarting",
    "rejoining",
    "rolling back",
    "done",
    "rolled back",
    "failed",
]
Outcome = Literal["running", "done", "failed", "stopped"]
MAX_LIVES = 4  # processes of one member within one restart; more end as soon as they begin


@dataclass(frozen=True)
class Sight:
    """What is seen of one member now."""

    is_up: bool  # it computes: a rank has served a token, a drafter has drafted
    is_told: bool  # it knows whom it may talk to now, and whether it is held
    incarnation: str  # of its process; '' while unknown
    revision: int  # it was started with
    failure: str = ""  # why its last start failed
    why: str = ""  # it is not up
    num_streams: int | None = 0  # here or about to come; None: it does not say
    num_used_blocks: int = 0  # by those
    num_free_blocks: int = 0
    num_places: int = 0  # streams it would still take


@dataclass(frozen=True)
class Action:
    """hold: nothing new goes there. move: its streams go on elsewhere. assign: this revision is read at the next start.
    restart: the processes end, and start again. free: it takes streams again."""

    kind: Literal["hold", "move", "assign", "restart", "free"]
    members: tuple[str, ...]
    revision: int = 0


@dataclass
class Step:
    """One unit's turn."""

    unit: Unit
    before: Mapping[str, int]  # revision of each member
    phase: Phase = "waiting"
    since_s: float = 0.0  # in this phase
    began_s: float | None = None
    ended_s: float | None = None
    num_moved: int = 0
    note: str = ""
    # Incarnations that were ended, and those seen since: a process is restarted once.
    ended: set[tuple[str, str]] = field(default_factory=set)
    lives: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, phase: Phase, now: float, note: str = "") -> None:
        self.phase, self.since_s, self.note = phase, now, note
        self.lives.clear()
        if phase in ("done", "rolled back", "failed"):
            self.ended_s = now


class Rollout:
    """Attributes:
    steps: in order; what has become of each.
    outcome: how it ended, or that it has not.
    reason: why it ended early.
    """

    def __init__(
        self, units: Sequence[Unit], wanted: int, before: Mapping[str, int], bounds: Bounds
    ) -> None:
        self.wanted = wanted
        self.bounds = bounds
        self.steps = [Step(u, {name: before[name] for name in u.members}) for u in units]
        self.outcome: Outcome = "running" if units else "done"
        self.reason = ""
        self.is_stopping = False  # asked to end after the unit whose turn it is
        self._at = 0
        self._waiting_since: float | None = None

    def advance(self, sights: Mapping[str, Sight], now: float) -> list[Action]:
        """What to do now. `sights`: of every drafter and rank."""
        if not self.is_running:
            return []
        step = self.steps[self._at]
        mine = {name: sights[name] for name in step.unit.members}
        match step.phase:
            case "waiting":
                return self._wait(step, sights, now)
            case "draining":
                others = {n: s for n, s in sights.items() if n not in mine}
                return self._drain(step, mine, others, now)
            case "restarting":
                return self._restart(step, mine, now)
            case "rejoining":
                return self._rejoin(step, mine, now)
            case _:
                return self._roll_back(step, mine, now)

    @property
    def is_running(self) -> bool:
        return self.outcome == "running"

    def moved(self, num_streams: int) -> None:
        """So many streams of the present unit were sent elsewhere."""
        self.steps[self._at].num_moved += num_streams

    # --- the turns of a unit ----------------------------------------------------------------------------------------

    def _wait(self, step: Step, sights: Mapping[str, Sight], now: float) -> list[Action]:
        """Everybody must be there before one goes; one that is parked takes nothing away."""
        if self.is_stopping:
            return self._end("stopped", "it was asked to stop")
        if self._waiting_since is None:
            self._waiting_since = now
        is_parked = all(sights[name].revision < 0 for name in step.unit.members)
        away = [f"{name} is not ready ({s.why})" for name, s in sights.items() if not s.is_up]
        away = [] if is_parked else away
        if away:
            step.note = "waits: " + "; ".join(away)
            if now - self._waiting_since > self.bounds.start_s:
                return self._end("failed", "; ".join(away))
            return []
        self._waiting_since = None
        step.began_s = now
        if step.unit.role == "drafter":
            # Its ranks decode plainly meanwhile, or borrow another; contexts are built again.
            return self._begin_restart(step, sights, now)
        step.enter("draining", now)
        return [Action("hold", step.unit.members)]

    def _drain(
        self, step: Step, mine: Mapping[str, Sight], others: Mapping[str, Sight], now: float
    ) -> list[Action]:
        counts = [s.num_streams for s in mine.values() if s.is_up]
        known = sum(count or 0 for count in counts)
        # A member that has not heard yet may still grant a place; one that has gone has nothing left.
        if all(count == 0 for count in counts) and all(s.is_told for s in mine.values() if s.is_up):
            return self._begin_restart(step, mine, now)
        waited_s = now - step.since_s
        if self.is_stopping:
            step.enter("failed", now, "not begun: it was asked to stop")
            return self._end("stopped", "it was asked to stop", Action("free", step.unit.members))
        step.note = f"{known} streams run"
        if waited_s < self.bounds.drain_s:
            return []
        lacking = self._lacking_room(mine, others)
        if not lacking:
            step.note = f"{known} streams move"
            return [Action("move", step.unit.members)]
        step.note = f"{known} streams wait for room elsewhere ({lacking})"
        if waited_s < self.bounds.drain_s + self.bounds.room_s:
            return []
        reason = f"no room for the {known} streams of {_names(step)}: {lacking}"
        step.enter("failed", now, "its streams found no room on other ranks; it goes on as it was")
        return self._end("failed", reason, Action("free", step.unit.members))

    def _lacking_room(self, mine: Mapping[str, Sight], others: Mapping[str, Sight]) -> str:
        """What the other ranks have too little of to take these streams; '' when nothing."""
        if self.bounds.allows_pause:
            return ""
        there = [sight for sight in others.values() if sight.is_up]
        needs = (
            (sum(s.num_streams or 0 for s in mine.values()), sum(s.num_places for s in there), "places"),
            (
                sum(s.num_used_blocks for s in mine.values()),
                sum(s.num_free_blocks for s in there),
                "KV blocks",
            ),
        )  # fmt: skip
        return "; ".join(
            f"{need} {what} needed, {have} free" for need, have, what in needs if need > have
        )

    def _begin_restart(self, step: Step, sights: Mapping[str, Sight], now: float) -> list[Action]:
        step.enter("restarting", now)
        assign = Action("assign", step.unit.members, self.wanted)
        return [assign, *self._ensure(step, sights, self.wanted)]

    def _restart(self, step: Step, mine: Mapping[str, Sight], now: float) -> list[Action]:
        if failure := self._failure(step, mine, now):
            return self._give_up(step, mine, failure, now)
        if self._is_back(mine, self.wanted):
            step.enter("rejoining", now)
            return [Action("free", step.unit.members)]
        step.note = "; ".join(f"{n}: {s.why}" for n, s in mine.items() if s.why)
        return self._ensure(step, mine, self.wanted)

    def _rejoin(self, step: Step, mine: Mapping[str, Sight], now: float) -> list[Action]:
        """It is let go; its turn is over when it knows the others again."""
        if failure := self._failure(step, mine, now):
            return self._give_up(step, mine, failure, now)
        if self._is_back(mine, self.wanted) and all(s.is_told for s in mine.values()):
            step.enter("done", now)
            self._at += 1
            if self._at == len(self.steps):
                self._end("done", "")
        return []

    def _give_up(
        self, step: Step, mine: Mapping[str, Sight], failure: str, now: float
    ) -> list[Action]:
        self.reason = failure
        step.enter("rolling back", now, failure)
        # Streams may be there already, where a member failed after it was let go.
        held = Action("hold", step.unit.members)
        assigned = [Action("assign", (name,), number) for name, number in step.before.items()]
        return [held, *assigned, *self._ensure(step, mine, None)]

    def _roll_back(self, step: Step, mine: Mapping[str, Sight], now: float) -> list[Action]:
        if all(s.is_up and s.revision == step.before[name] for name, s in mine.items()):
            step.enter("rolled back", now, self.reason)
            return self._end("failed", self.reason, Action("free", step.unit.members))
        if now - step.since_s > self.bounds.start_s:
            missing = "; ".join(
                f"{n}: {s.failure or s.why}" for n, s in mine.items() if not s.is_up
            )
            step.enter(
                "failed", now, f"it does not come up with its old settings either: {missing}"
            )
            reason = f"{self.reason}; and not with the old settings either: {missing}"
            return self._end("failed", reason, Action("free", step.unit.members))
        return self._ensure(step, mine, None)

    # --- parts ------------------------------------------------------------------------------------------------------

    def _ensure(
        self, step: Step, sights: Mapping[str, Sight], revision: int | None
    ) -> list[Action]:
        """Restart members whose process was started with another revision (None: each with its own old one)."""
        due = []
        for name in step.unit.members:
            sight = sights[name]
            wanted = step.before[name] if revision is None else revision
            life = (name, sight.incarnation)
            if sight.incarnation and sight.revision != wanted and life not in step.ended:
                step.ended.add(life)
                due.append(name)
        return [Action("restart", tuple(due))] if due else []

    def _failure(self, step: Step, mine: Mapping[str, Sight], now: float) -> str:
        """Why the new revision does not come up; '' while it may."""
        for name, sight in mine.items():
            life = (name, sight.incarnation)
            if life in step.ended:
                continue  # the old process: whatever it says is over
            if sight.failure:
                return f"{name} does not come up: {sight.failure}"
            if sight.incarnation:
                step.lives.add(life)
        for name in mine:
            lives = sum(who == name for who, _ in step.lives)
            if lives > MAX_LIVES:
                return (
                    f"{name} does not come up: its process ended {lives - 1} times while it started"
                )
        if now - step.since_s > self.bounds.start_s:
            late = "; ".join(f"{n}: {s.why}" for n, s in mine.items() if not s.is_up)
            return f"not ready within {self.bounds.start_s:g} s: {late}"
        return ""

    def _is_back(self, mine: Mapping[str, Sight], revision: int) -> bool:
        return all(s.is_up and s.revision == revision for s in mine.values())

    def _end(self, outcome: Outcome, reason: str, *last: Action) -> list[Action]:
        self.outcome, self.reason = outcome, reason
        return list(last)


def _names(step: Step) -> str:
    return " and ".join(step.unit.members)
