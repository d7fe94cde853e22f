"""What can be seen of a local cluster from the process that started it: members, processes, what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import ray
from ray.exceptions import RayError

from cluster.names import NAMESPACE, SUPERVISOR

LOOK_EVERY_S = 0.4
FRESH_S = 2.5  # a status older than this shows no victim
ANSWER_WITHIN_S = 5.0
SETTLE_S = 60.0
_TITLES = {"supervisor": "ray::Supervisor", "ingress": "ray::ServeReplica:dspark:Ingress"}
_TITLE = re.compile(r"ray::([\w:]+)")


class ClusterView:
    """Looks at the supervisor all the time.

    Args:
        endpoint: URL of the API (…/v1).
    """

    def __init__(self, endpoint: str) -> None:
        self._health = endpoint.removesuffix("/v1") + "/health"
        self._models = f"{endpoint}/models"
        self._supervisor: Any = ray.get_actor(SUPERVISOR, namespace=NAMESPACE)
        self._members: dict[str, dict[str, Any]] = {}
        self._is_settled = False
        self._ours: dict[int, tuple[psutil.Process, str]] = {}  # by pid, with their titles
        self._looked_at = float("-inf")
        self._http = httpx.AsyncClient(timeout=ANSWER_WITHIN_S, trust_env=False)
        self._task = asyncio.create_task(self._look())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._http.aclose()

    async def _look(self) -> None:
        while True:
            asked_at = time.monotonic()
            self._ours = await asyncio.to_thread(_processes)
            with contextlib.suppress(RayError, TimeoutError):  # it is restarting
                status = await self._ask("status")
                self._members = {member["name"]: member for member in status["members"]}
                self._is_settled = status["is_settled"]
                self._looked_at = asked_at
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, method: str) -> dict[str, Any]:
        asked: Any = getattr(self._supervisor, method).remote()
        answer: dict[str, Any] = await asyncio.wait_for(asked, ANSWER_WITHIN_S)
        return answer

    # --- members ----------------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self._looked_at < FRESH_S

    def ready(self, role: str) -> list[str]:
        """Names of the parts of that role that are ready now; none while nobody can say."""
        if role in _TITLES:
            return [role] if self.processes(role) else []
        members = self._members.values() if self.is_fresh else ()
        return [m["name"] for m in members if (m["role"], m["state"]) == (role, "ready")]

    def processes(self, name: str) -> list[psutil.Process]:
        """The living process of a member, of the supervisor, or those of the ingress; only ever our own."""
        if name in _TITLES:
            return [one for one, title in self._ours.values() if title.startswith(_TITLES[name])]
        one, title = self._ours.get(self._members.get(name, {}).get("pid", 0), (None, ""))
        return [one] if one is not None and title.startswith("ray::") else []

    async def is_well(
        self, name: str, since: float, old_pids: set[int], struck: set[str] | None = None
    ) -> bool:
        """Whether, looked at after `since`, the part is ready, in a process that is none of `old_pids`.

        `struck`: other parts that faults have just hit. A supervisor is well although these still start.
        """
        if name == "ingress":
            pids = {one.pid for one in self.processes("ingress")}
            return bool(pids) and not pids & old_pids and await self._is_served()
        struck = (struck or set()) - {name}
        if self._looked_at <= since:
            return False
        if name == "supervisor":
            pids = {one.pid for one in self.processes("supervisor")}
            states = {m["state"] for m in self._members.values() if m["name"] not in struck}
            has_settled = self._is_settled or bool(struck)
            return has_settled and bool(pids) and not pids & old_pids and "starting" not in states
        if not self._is_settled:
            return False
        member = self._members[name]
        return bool(member["state"] == "ready" and member["pid"] not in old_pids)

    async def _is_served(self) -> bool:
        try:
            return (await self._http.get(self._models)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def num_streams(self) -> int | None:
        """Open at the ingress; None while it does not say."""
        try:
            return int((await self._http.get(self._health)).json()["num_streams"])
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    # --- what is held -----------------------------------------------------------------------------------------------

    async def census(self) -> Counter[str]:
        """Living actors by class, busy processes by title, placement groups."""
        return await asyncio.to_thread(_census)

    async def leaks(self, before: Counter[str]) -> list[str]:
        """What is not back at its baseline, once the cluster had time to settle."""
        deadline = time.monotonic() + SETTLE_S
        while (found := await self._leaks(before)) and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
        return found

    async def _leaks(self, before: Counter[str]) -> list[str]:
        found = [
            f"{m['name']} is {m['state']}" for m in self._members.values() if m["state"] != "ready"
        ]
        if not (self.is_fresh and self._is_settled):
            found.append("the cluster has not settled")
        try:
            for name, stats in (await self._ask("stats")).items():
                found += [f"{name}: {text}" for text in held_by(stats)]
        except (RayError, TimeoutError) as error:
            found.append(f"the supervisor does not answer: {error!r}")
        if num_streams := await self.num_streams():
            found.append(f"ingress: {num_streams} streams are open")
        now = await self.census()
        changed = {name for name in now | before if now[name] != before[name]}
        return found + [f"{name}: {now[name]}, before {before[name]}" for name in sorted(changed)]

    async def totals(self, *names: str) -> dict[str, int]:
        """Counters of the ranks of now, summed; their earlier incarnations have taken theirs with them."""
        try:
            stats = await self._ask("stats")
        except (RayError, TimeoutError):
            stats = {}
        return {name: sum(int(of.get(name, 0)) for of in stats.values()) for name in names}


def held_by(stats: dict[str, Any]) -> list[str]:
    """What a member's counters say it still holds, or found wrong, while nothing runs."""
    if "error" in stats:
        return [f"no counters: {stats['error']}"]
    found = [f"idle check: {problem}" for problem in stats.get("idle_problems", ())]
    if stats.get("num_idle_problems"):
        found.append(f"{stats['num_idle_problems']} problems in idle checks")
    if not stats.get("is_idle", True):
        found.append("is not idle")
    free, every = stats.get("num_free_blocks"), stats.get("num_blocks")
    if free is not None and free != every:  # a drafter counts other blocks
        found.append(f"{free} of {every} KV blocks are free")
    for held in ("num_reservations", "num_running", "num_waiting", "open_requests"):
        if stats.get(held):
            found.append(f"{held} {stats[held]}")
    return found


def _census() -> Counter[str]:
    living: Counter[str] = Counter()
    for actor in ray._private.state.actors().values():
        if actor["State"] != "DEAD":
            living[f"actors {actor['ActorClassName']}"] += 1
    for _, title in _processes().values():
        found = _TITLE.match(title)
        if found and found[1] != "IDLE" and not found[1].startswith("IDLE_"):
            living[f"processes {found[1]}"] += 1
    for group in ray.util.placement_group_table().values():
        if group["state"] != "REMOVED":
            living["placement groups"] += 1
    return living


def _processes() -> dict[int, tuple[psutil.Process, str]]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found[process.pid] = process, " ".join(process.cmdline())
    return found
