"""The supervisor's hands in autoscaling: it asks the allocator what a token takes, and parks or starts ranks.

Whether and which is decided by `actors.core.autoscale`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from actors.core.autoscale import Autoscaler, ScaleDecision, ScaleLimits, StartPauses, UnitLoad
from actors.core.rollout import Rollout
from actors.core.rollout_plan import Bounds, units_of
from cluster.rollout import RolloutDesk
from cluster.routing import RouteBook
from configs.autoscale import AutoscaleConfig

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0


class AutoscaleDesk:
    """Looks at the ranks once a round, while `autoscale.enabled`.

    Args:
        book: what is known of the members.
        desk: moves streams and restarts ranks.
        groups: names of the ranks that step together.
        ask: the supervisor's way to call a member: name, method, timeout in seconds, arguments.

    Attributes:
        last: what was decided last; None while it is off.
    """

    def __init__(
        self,
        book: RouteBook,
        desk: RolloutDesk,
        groups: Sequence[tuple[str, ...]],
        ask: Callable[..., Awaitable[Any]],
    ) -> None:
        self._book = book
        self._desk = desk
        self._groups = groups
        self._ask = ask
        self._settings: AutoscaleConfig | None = None
        self._scaler: Autoscaler
        self._pauses = StartPauses()
        self._start: tuple[tuple[str, ...], Rollout] | None = None  # under way
        self.last: ScaleDecision | None = None

    async def look(self) -> None:
        """Decide, and begin what was decided; what is under way is let be."""
        self._note_start()
        settings = self._book.assignment.config.autoscale
        if not settings.enabled:
            self.last = self._settings = None
            self._start_parked()
            return
        if settings != self._settings:
            self._settings = settings
            self._scaler = Autoscaler(limits_of(settings, len(self._units[0])))
        if self._desk.is_busy:
            self._scaler.look_away()
            return
        try:
            loads = await self._loads()
        except (TimeoutError, RayError) as error:
            self.last = ScaleDecision("keep", f"the allocator does not answer: {error}")
            return
        self.last = decision = self._scaler.decide(loads, time.monotonic())
        if decision.kind != "keep":
            log.warning("autoscale: %s %s: %s", decision.kind, decision.members, decision.why)
            self._scale(decision.members, is_parked=decision.kind == "park")

    def _start_parked(self) -> None:
        """Off: nobody else would start what was parked while it was on."""
        parked = [unit for unit in self._units if self._state(unit) == "parked"]
        if parked and not self._desk.is_busy:
            log.warning("autoscale is off: %s start", parked[0])
            self._scale(parked[0], is_parked=False)

    def _scale(self, unit: tuple[str, ...], *, is_parked: bool) -> None:
        begun = self._desk.scale(unit, is_parked=is_parked, bounds=Bounds())
        self._start = None if is_parked else (unit, begun)

    def _note_start(self) -> None:
        """How the last start has ended."""
        if self._start is None or self._start[1].is_running:
            return
        (unit, begun), self._start = self._start, None
        if begun.outcome == "done":
            self._pauses.succeeded(self._attempt(unit))
        else:
            pause_s = self._pauses.failed(self._attempt(unit), time.monotonic())
            log.error("%s stay parked, for %.0f s at least: %s", unit, pause_s, begun.reason)

    def _attempt(self, unit: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        """What tells one start of a unit from another: the settings it starts with."""
        return unit, self._book.assignment.current

    @property
    def _units(self) -> list[tuple[str, ...]]:
        ranks = [m.name for m in self._book.members.values() if m.role == "target"]
        return [unit.members for unit in units_of((), ranks, self._groups)]

    def _state(self, unit: tuple[str, ...]) -> Any:
        states = {self._book.members[name].state for name in unit}
        if states == {"ready"}:
            return "serving"
        if states != {"parked"}:
            return "changing"
        is_held = self._pauses.holds(self._attempt(unit), time.monotonic())
        return "failing" if is_held else "parked"

    async def _loads(self) -> list[UnitLoad]:
        states = {unit: self._state(unit) for unit in self._units}
        serving = [unit for unit, state in states.items() if state == "serving"]
        told = await self._ask("allocator", "foretell", ASK_TIMEOUT_S, serving)
        known = dict(zip(serving, told, strict=True))
        return [UnitLoad(unit, state, *known.get(unit, ())) for unit, state in states.items()]


def limits_of(settings: AutoscaleConfig, unit_size: int) -> ScaleLimits:
    """For units of so many ranks."""
    return ScaleLimits(
        target_tpot_s=settings.target_tpot_ms / 1000,
        park_share=settings.park_share,
        up_after_s=settings.up_after_s,
        down_after_s=settings.down_after_s,
        cooldown_s=settings.cooldown_s,
        min_units=-(-settings.min_ranks // unit_size),
    )
