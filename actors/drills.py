"""Actors that can be disturbed on purpose. They exist only in a cluster with `link.drills`; all others lack the calls.

What is swapped is the link of a running shell, and the process's wall clock: an undisturbed shell pays nothing.
"""

from __future__ import annotations

import logging
import time

from actors.allocator import AllocatorActor
from actors.drafter import DrafterActor
from actors.link.actor_link import ActorLink
from actors.link.disturbed import Disturbance, DisturbedLink
from actors.link.local import Frames
from actors.shell import Shell
from actors.target import TargetActor

log = logging.getLogger(__name__)

_true_time, _true_time_ns = time.time, time.time_ns


class Drilled(Shell):
    """Control calls of a shell in a drill."""

    async def disturb(self, disturbance: Disturbance) -> None:
        """Lose, repeat and delay messages of this process, in and out, until `calm` or its time is over."""
        await self.on_loop(lambda: self._disturb(disturbance))

    async def calm(self) -> dict[str, int]:
        """End the disturbance; returns how many messages were dropped, repeated and delayed."""
        return await self.on_loop(self._calm)

    async def shift_clock(self, seconds: float) -> None:
        """The wall clock of this process jumps to `seconds` off the true one; 0 sets it right again.

        The monotonic clock, which all deadlines are measured with, cannot jump; it stands still in a stopped process.
        """
        await self.on_loop(lambda: _shift_wall_clock(seconds))

    async def deliver(self, epoch: str, batch: list[Frames]) -> int:
        link = getattr(self, "link", None)
        inner = link.inner if isinstance(link, DisturbedLink) else link
        return inner.deliver(epoch, batch) if isinstance(inner, ActorLink) else 0

    def _disturb(self, disturbance: Disturbance) -> None:
        self._calm()
        log.warning("%s: drill: %s", self.seat.name, disturbance)
        self.link = DisturbedLink(self.link, disturbance)

    def _calm(self) -> dict[str, int]:
        link = self.link
        if not isinstance(link, DisturbedLink):
            return {}
        done = link.calm()
        self.link = link.inner
        return done


def _shift_wall_clock(seconds: float) -> None:
    if not seconds:
        time.time, time.time_ns = _true_time, _true_time_ns
        return
    nanoseconds = int(seconds * 1e9)
    time.time = lambda: _true_time() + seconds
    time.time_ns = lambda: _true_time_ns() + nanoseconds


class DrilledTarget(Drilled, TargetActor):
    """A target rank in a drill."""


class DrilledDrafter(Drilled, DrafterActor):
    """A drafter in a drill."""


class DrilledAllocator(Drilled, AllocatorActor):
    """The allocator in a drill."""
