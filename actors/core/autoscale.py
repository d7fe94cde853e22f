"""How many units (ranks, or groups of them) serve: by the predicted time per token, not by the length of a queue.

What a unit costs is known from its measured curve: the allocator foretells the time between two tokens of one more
stream as it is now, and as it would be if one unit fewer carried the same streams. The first decides when a parked unit
is started, the second when one is parked. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.core.held import milliseconds, since

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0  # after a start that failed


@dataclass(frozen=True)
class UnitLoad:
    """One unit now. Times are predicted seconds between two tokens of a stream that came in addition."""

    members: tuple[str, ...]
    # changing: it starts, drains or is away; failing: parked, and its last start failed a moment ago
    state: Literal["serving", "parked", "changing", "failing"]
    num_streams: int = 0  # that run or wait there
    tpot_s: float | None = None  # None: not known yet
    tpot_with_fewer_s: float | None = None  # where one serving unit fewer carried all streams


@dataclass(frozen=True)
class ScaleLimits:
    """When to change.

    Attributes:
        target_tpot_s: what a stream shall wait for a token at most.
        park_share: a unit is parked only when the others would stay below this share of that.
        up_after_s, down_after_s: so long without a break it must be too slow, or fast enough with fewer.
        cooldown_s: after a change nothing is changed for so long: the streams must spread first.
        min_units: so many serve always.
    """

    target_tpot_s: float
    park_share: float
    up_after_s: float
    down_after_s: float
    cooldown_s: float
    min_units: int


@dataclass(frozen=True)
class ScaleDecision:
    """What to do now, and why, for people."""

    kind: Literal["keep", "start", "park"]
    why: str
    members: tuple[str, ...] = ()


class Autoscaler:
    """Keeps in mind since when it has been too slow, fast enough with fewer, or too few."""

    def __init__(self, limits: ScaleLimits) -> None:
        self.limits = limits
        self._slow_since: float | None = None
        self._spare_since: float | None = None
        self._short_since: float | None = None
        self._changed_at: float | None = None

    def decide(self, units: Sequence[UnitLoad], now: float) -> ScaleDecision:
        """What to do with these units, in the order of their numbers, at `now` (seconds)."""
        limits = self.limits
        serving = [unit for unit in units if unit.state == "serving"]
        parked = [unit for unit in units if unit.state == "parked"]
        is_changing = any(unit.state == "changing" for unit in units)
        is_short = len(serving) < limits.min_units and bool(parked)
        self._short_since = since(self._short_since, is_short, now)
        # One that is away may be back in a moment, or be gone for good.
        patience_s = limits.up_after_s if is_changing else 0.0
        if self._short_since is not None and now - self._short_since >= patience_s:
            return self._change("start", parked[0], f"{limits.min_units} units serve always", now)
        if is_changing:
            self.look_away()
            return ScaleDecision("keep", "a unit starts, drains or is away")
        known = [unit.tpot_s for unit in serving if unit.tpot_s is not None]
        if len(known) < len(serving) or not known:
            return ScaleDecision("keep", "the time per token is not known of every unit")
        # New streams go to the fastest: it is too slow only when that one is.
        fastest_s, target_s = min(known), limits.target_tpot_s
        fewer_s = max(
            float("inf") if u.tpot_with_fewer_s is None else u.tpot_with_fewer_s for u in serving
        )
        spare = len(serving) > limits.min_units and fewer_s < limits.park_share * target_s
        self._slow_since = since(self._slow_since, fastest_s > target_s, now)
        self._spare_since = since(self._spare_since, spare, now)
        told = f"a token takes {milliseconds(fastest_s)}, the target is {milliseconds(target_s)}"
        if self._changed_at is not None and now - self._changed_at < limits.cooldown_s:
            return ScaleDecision("keep", f"{told}; the last change was a moment ago")
        if self._slow_since is not None and now - self._slow_since >= limits.up_after_s:
            if parked:
                return self._change("start", parked[0], told, now)
            failing = [" and ".join(u.members) for u in units if u.state == "failing"]
            lacking = f"{', '.join(failing)} failed to start" if failing else "no unit is parked"
            return ScaleDecision("keep", f"{told}; {lacking}")
        if self._spare_since is not None and now - self._spare_since >= limits.down_after_s:
            # The last of the emptiest: numbers stay dense, and few streams must move.
            unit = min(reversed(serving), key=lambda unit: unit.num_streams)
            return self._change(
                "park", unit, f"{told}; with one fewer {milliseconds(fewer_s)}", now
            )
        return ScaleDecision("keep", told)

    def look_away(self) -> None:
        """What was seen until now tells nothing about the next look: the load could not be judged in between."""
        self._slow_since = self._spare_since = None

    def _change(
        self, kind: Literal["start", "park"], unit: UnitLoad, why: str, now: float
    ) -> ScaleDecision:
        self._changed_at = now
        self._short_since = None
        self.look_away()
        return ScaleDecision(kind, why, unit.members)


class StartPauses:
    """A start that fails is tried again after a pause, each time twice as long, until one succeeds.

    `what` is what was started, the settings included: with others it may well succeed.
    """

    def __init__(self) -> None:
        self._failed: dict[Hashable, tuple[int, float]] = {}  # how often, and until when to wait

    def failed(self, what: Hashable, now: float) -> float:
        """It has failed, at `now` (seconds). Returns how long it is let be."""
        times = self._failed.get(what, (0, 0.0))[0] + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 16), LONGEST_PAUSE_S)
        self._failed[what] = times, now + pause_s
        return pause_s

    def succeeded(self, what: Hashable) -> None:
        """It has started: an earlier failure tells nothing any more."""
        self._failed.pop(what, None)

    def holds(self, what: Hashable, now: float) -> bool:
        """Whether it must not be tried yet."""
        return what in self._failed and now < self._failed[what][1]
