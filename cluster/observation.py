"""What is known of the whole cluster at one moment: every member's state and counters, and every ingress replica's.

Nothing is gathered unless somebody looks; however many look, the members are asked at most once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.9  # a page that polls each second always sees something new
LOOK_TIMEOUT_S = 4.0
MAX_STALE_S = 60.0  # what a silent member said longer ago is not shown any more

AskCluster = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""`Supervisor.observe`: (own name, own counters) to {"members", "stats", "fronts"}."""


@dataclass(frozen=True)
class Observation:
    """One look. A member that does not answer keeps what it said last, with its age.

    Attributes:
        members: `Supervisor.status` of each.
        stats: by member; absent for one that has not answered lately.
        stale_s: age of what `stats` holds, for members that did not answer this time.
        fronts: `FrontMetrics.snapshot` by ingress replica.
        num_failed_looks: looks at which the supervisor itself gave no answer.
        at_s: of the supervisor's last answer, on the loop's clock.
    """

    members: tuple[dict[str, Any], ...] = ()
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    stale_s: dict[str, float] = field(default_factory=dict)
    fronts: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_killed: int = 0
    num_failed_looks: int = 0
    at_s: float = float("-inf")

    def of_role(self, role: str) -> list[tuple[str, dict[str, Any]]]:
        """(name, stats) of the members of this role that have said something."""
        names = [member["name"] for member in self.members if member["role"] == role]
        return [(name, self.stats[name]) for name in names if name in self.stats]


class Observer:
    """Looks at the cluster for one ingress replica.

    Args:
        name: of the replica.
        own: its counters, as they are now.
        ask: the supervisor; None where there is none, then only the own counters are seen.
    """

    def __init__(
        self, name: str, own: Callable[[], dict[str, Any]], ask: AskCluster | None
    ) -> None:
        self.name = name
        self.own = own
        self._ask = ask
        self._last = Observation()
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}  # stats of each, and when
        self._lock = asyncio.Lock()

    async def look(self) -> Observation:
        """The newest observation; the own counters are always those of this moment."""
        async with self._lock:
            loop = asyncio.get_running_loop()
            if self._ask is not None and loop.time() - self._last.at_s >= LOOK_INTERVAL_S:
                self._last = await self._refresh(self._ask, loop)
        last = self._last
        return Observation(**{**vars(last), "fronts": {**last.fronts, self.name: self.own()}})

    async def _refresh(self, ask: AskCluster, loop: asyncio.AbstractEventLoop) -> Observation:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                answer = await ask(self.name, self.own())
        except Exception as error:
            failed = self._last.num_failed_looks + 1
            logger.warning("the supervisor cannot be asked about the cluster: %r", error)
            return Observation(**{**vars(self._last), "num_failed_looks": failed})
        now_s = loop.time()
        for name, stats in answer["stats"].items():
            if "error" not in stats:
                self._heard[name] = now_s, stats
        self._heard = {n: h for n, h in self._heard.items() if now_s - h[0] <= MAX_STALE_S}
        return Observation(
            members=tuple(answer["members"]),
            stats={name: stats for name, (_, stats) in self._heard.items()},
            stale_s={n: now_s - at for n, (at, _) in self._heard.items() if at < now_s},
            fronts=answer["fronts"],
            num_killed=answer["num_killed"],
            num_failed_looks=self._last.num_failed_looks,
            at_s=now_s,
        )
