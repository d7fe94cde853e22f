"""How many ingress replicas serve: by the time a token waits in the front, not by the length of a queue.

A token that comes from a rank waits until the event loop of its replica gets to it. That is the front's share of the
time per token, the only one that more replicas shorten; each replica measures it as the lateness of its own loop. A
loop that is busy for a share ρ of the time keeps its work waiting for about w·ρ/(1-ρ), w being what a piece of work
takes; w follows from what is seen now, and the wait at any other number of replicas from dividing the same work by it.
No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.core.held import milliseconds, since

FULL_SHARE = 0.95  # a loop that is busier than that does not keep up
IDLE_SHARE = 0.01  # what less busy loops say of w is noise


@dataclass(frozen=True)
class FrontLoad:
    """One ingress replica over the last seconds, as it measures itself."""

    busy_share: float  # of a core, by the thread of its event loop
    lag_s: float  # mean lateness of that loop
    num_streams: float  # open ones


@dataclass(frozen=True)
class FrontLimits:
    """When to change.

    Attributes:
        least, most: so many replicas serve.
        target_lag_s: so long a token may wait in the front.
        spare_share: one replica ends only while the others would stay below this share of that.
        busy_share: a loop that is late although it is less busy than this lacks a core, not a second replica.
        up_after_s, down_after_s: so long without a break it must be too slow, or fast enough with one fewer.
    """

    least: int
    most: int
    target_lag_s: float
    spare_share: float = 0.5
    busy_share: float = 0.4
    up_after_s: float = 10.0
    down_after_s: float = 300.0


@dataclass(frozen=True)
class FrontDecision:
    """So many replicas shall serve, and why, for people."""

    num_replicas: int
    why: str


def foretold_lag_s(loads: Sequence[FrontLoad], num_replicas: int) -> float:
    """Seconds a token would wait if so many replicas shared the work of these; inf where they would not keep up."""
    busy = [min(max(load.busy_share, IDLE_SHARE), FULL_SHARE) for load in loads]
    work_s = sum(load.lag_s for load in loads) / sum(share / (1 - share) for share in busy)
    each = sum(busy) / num_replicas
    return work_s * each / (1 - each) if each < FULL_SHARE else float("inf")


class IngressScaler:
    """Keeps in mind since when it has been too slow, or fast enough with one replica fewer."""

    def __init__(self, limits: FrontLimits) -> None:
        self.limits = limits
        self._slow_since: float | None = None
        self._spare_since: float | None = None

    def decide(self, loads: Sequence[FrontLoad], num_wanted: int, now: float) -> FrontDecision:
        """How many replicas shall serve from `now` (seconds) on; `num_wanted` were to, `loads` are known of."""
        limits = self.limits
        bounded = min(max(num_wanted, limits.least), limits.most)
        if len(loads) != num_wanted or bounded != num_wanted:
            self._slow_since = self._spare_since = None
            return FrontDecision(bounded, f"{len(loads)} of {num_wanted} replicas are known of")
        lag_s, busy = _lag_s(loads), sum(load.busy_share for load in loads) / num_wanted
        told = (
            f"a token waits {milliseconds(lag_s)} in the front, {milliseconds(limits.target_lag_s)} are allowed; "
            f"event loops are busy {busy:.0%}"
        )
        is_slow, is_busy = lag_s > limits.target_lag_s, busy >= limits.busy_share
        fewer_s = foretold_lag_s(loads, num_wanted - 1) if num_wanted > limits.least else None
        is_spare = fewer_s is not None and fewer_s < limits.spare_share * limits.target_lag_s
        self._slow_since = since(self._slow_since, is_slow and is_busy, now)
        self._spare_since = since(self._spare_since, is_spare and not is_slow, now)
        if is_slow and not is_busy:
            return FrontDecision(num_wanted, f"{told}: the machine is short of cores")
        if is_slow and num_wanted == limits.most:
            return FrontDecision(num_wanted, f"{told}; there are as many replicas as may be")
        if self._slow_since is not None and now - self._slow_since >= limits.up_after_s:
            return self._change(self._enough(loads, num_wanted), told)
        if self._spare_since is not None and now - self._spare_since >= limits.down_after_s:
            assert fewer_s is not None
            return self._change(
                num_wanted - 1, f"{told}; with one fewer it would be {milliseconds(fewer_s)}"
            )
        return FrontDecision(num_wanted, told)

    def _enough(self, loads: Sequence[FrontLoad], num_now: int) -> int:
        """The fewest more that would do; all there may be where none would."""
        for number in range(num_now + 1, self.limits.most):
            if foretold_lag_s(loads, number) <= self.limits.target_lag_s:
                return number
        return self.limits.most

    def _change(self, num_replicas: int, why: str) -> FrontDecision:
        self._slow_since = self._spare_since = None
        return FrontDecision(num_replicas, why)


def _lag_s(loads: Sequence[FrontLoad]) -> float:
    """What the token of an open stream waits, on average; without streams nobody waits."""
    streams = sum(load.num_streams for load in loads)
    return sum(load.lag_s * load.num_streams for load in loads) / streams if streams else 0.0
