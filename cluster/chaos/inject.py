"""Brings faults about, and waits until the cluster is well again."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from actors.link.disturbed import Disturbance
from cluster.chaos.history import History
from cluster.chaos.load import Load
from cluster.chaos.plan import KINDS, Action, Fault
from cluster.chaos.view import ClusterView
from cluster.names import NAMESPACE

RECOVERS_WITHIN_S = 180.0
CHECK_EVERY_S = 0.1
CONTROL_S = 10.0
LONGEST_PAUSE_S, LONGEST_DISTURBANCE_S, LONGEST_JUMP_S = 8.0, 5.0, 7200.0
DROPPED, REPEATED, LATE, LATEST_S = 0.05, 0.05, 0.2, 0.5
_CLIENTS: dict[Action, str] = {"crowd": "more clients", "leave": "the clients"}


class Injector:
    """Strikes one part at a time per fault; several faults may run at once, never two at one part.

    Args:
        crowd: streams that a `memory` fault adds.
    """

    def __init__(self, view: ClusterView, load: Load, history: History, crowd: int) -> None:
        self._view, self._load, self._history, self._crowd = view, load, history, crowd
        self._busy: set[str] = set()
        self.effects: Counter[str] = Counter()
        self._do: dict[Action, Callable[[Fault, str], Awaitable[set[int]]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "disturb": self._disturb,
            "shift": self._shift,
            "crowd": self._crowd_in,
            "leave": self._leave,
        }

    def victims(self, kind: str) -> list[str]:
        """Whom a fault of that kind could hit now."""
        about = KINDS[kind]
        if not about.roles:
            found = [_CLIENTS[about.action]]
        else:
            ready = [name for role in about.roles for name in self._view.ready(role)]
            found = [name for name in ready if self._view.processes(name)]
        return [name for name in found if name not in self._busy]

    async def strike(self, fault: Fault) -> None:
        """Bring it about; returns when its victim is well again, or when that took too long."""
        victims = self.victims(fault.kind)
        victim = victims[int(fault.pick * len(victims))]
        about = KINDS[fault.kind]
        self._busy.add(victim)
        try:
            self._history.note("fault", fault=fault.number, kind=fault.kind, victim=victim)
            old_pids = await self._do[about.action](fault, victim)
            detail = await self._recover(victim, old_pids)
        finally:
            self._busy.discard(victim)
        if detail:
            self._history.note("unrecovered", fault=fault.number, detail=detail)
        else:
            self._history.note("recovered", fault=fault.number)

    async def _recover(self, victim: str, old_pids: set[int]) -> str:
        if victim in _CLIENTS.values():
            return ""
        since = time.monotonic()
        while not await self._view.is_well(victim, since, old_pids, self._busy):
            if time.monotonic() - since > RECOVERS_WITHIN_S:
                return f"{victim} was not well within {RECOVERS_WITHIN_S:g} s"
            await asyncio.sleep(CHECK_EVERY_S)
        return ""

    # --- kinds ------------------------------------------------------------------------------------------------------

    async def _kill(self, fault: Fault, victim: str) -> set[int]:
        processes = self._view.processes(victim)
        if len(processes) > 1:  # several ingress replicas: one of them
            processes = [processes[int(fault.size * len(processes))]]
        _signal(processes, signal.SIGKILL)
        return {process.pid for process in processes}

    async def _pause(self, fault: Fault, victim: str) -> set[int]:
        processes = self._view.processes(victim)
        _signal(processes, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.size * LONGEST_PAUSE_S)
        finally:
            _signal(processes, signal.SIGCONT)
        return set()

    async def _disturb(self, fault: Fault, victim: str) -> set[int]:
        lasts_s = 1.0 + fault.size * (LONGEST_DISTURBANCE_S - 1)
        law = Disturbance(fault.number, DROPPED, REPEATED, LATE, LATEST_S, lasts_s)
        await self._control(victim, "disturb", law)
        await asyncio.sleep(lasts_s)
        self.effects.update(
            {
                name.replace("num_", "messages_"): n
                for name, n in (await self._control(victim, "calm") or {}).items()
            }
        )
        return set()

    async def _shift(self, fault: Fault, victim: str) -> set[int]:
        await self._control(victim, "shift_clock", (2 * fault.size - 1) * LONGEST_JUMP_S)
        await asyncio.sleep(1.0)
        await self._control(victim, "shift_clock", 0.0)
        self.effects["clock_jumps"] += 2
        return set()

    async def _crowd_in(self, fault: Fault, _: str) -> set[int]:
        before = await self._view.totals("num_preempted")
        await self._load.crowd(self._crowd, random.Random(fault.number))
        after = await self._view.totals("num_preempted")
        # A rank that started anew in between has begun to count anew.
        self.effects["preempted"] += max(0, after["num_preempted"] - before["num_preempted"])
        return set()

    async def _leave(self, fault: Fault, _: str) -> set[int]:
        left = self._load.hang_up(random.Random(fault.number))
        self.effects["clients_left"] += len(left)
        deadline = time.monotonic() + RECOVERS_WITHIN_S
        while time.monotonic() < deadline:
            open_now = await self._view.num_streams()
            if open_now is not None and open_now <= self._load.num_open:
                break
            await asyncio.sleep(CHECK_EVERY_S)
        return set()

    async def _control(self, victim: str, method: str, *arguments: Any) -> Any:
        """A control call; a victim that ended meanwhile (its group was formed anew) has forgotten it anyway."""
        with suppress(RayError, TimeoutError, ValueError):
            actor = ray.get_actor(victim, namespace=NAMESPACE)
            return await asyncio.wait_for(getattr(actor, method).remote(*arguments), CONTROL_S)
        return None


def _signal(processes: list[psutil.Process], what: signal.Signals) -> None:
    for process in processes:
        with suppress(
            psutil.NoSuchProcess
        ):  # psutil knows a process from one that got its number later
            process.send_signal(what)
