"""The supervisor's care for one group of ranks: it is put together, and a rank that holds up the others is ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.core.lockstep import GroupBook
from actors.peers import Phase
from cluster.routing import Member, RouteBook

log = logging.getLogger(__name__)

FORM_TIMEOUT_S = 2.0
_ALONE: tuple[Phase, ...] = (
    "starting",
    "loading",
    "parked",
    "stopped",
    "failed",
)  # holds up nobody


class GroupCare:
    """One group.

    Args:
        group: when it is formed.
        book: what is known of its ranks.
        ask: the supervisor's way to call a member: name, method, timeout in seconds, arguments.
        kill: ends a member's process for a cause.
    """

    def __init__(
        self,
        group: GroupBook,
        book: RouteBook,
        ask: Callable[..., Awaitable[Any]],
        kill: Callable[[Member, str], None],
    ) -> None:
        self._group = group
        self._book = book
        self._ask = ask
        self._kill = kill

    async def look(self) -> None:
        """Put it together as soon as all its ranks wait for that; end a rank that holds up the others."""
        group = self._group
        members = [self._book.members[name] for name in group.members]
        formations = group.form([member.offer for member in members])
        if formations is not None:
            log.info("group %s is formed, epoch %d", ", ".join(group.members), formations[0].epoch)
            calls = [
                self._ask(member.name, "form", FORM_TIMEOUT_S, formation)
                for member, formation in zip(members, formations, strict=True)
            ]
            for member, answer in zip(
                members, await asyncio.gather(*calls, return_exceptions=True), strict=True
            ):
                if isinstance(answer, BaseException):
                    log.warning("%s was not told of its group: %r", member.name, answer)
        now = time.monotonic()
        bound_s = self._book.assignment.config.target.collective_timeout_s
        for name in group.held_up([_silent_s(member, now) for member in members], bound_s):
            member = self._book.members[name]
            member.heard_at_s = None  # the next process has its own time
            self._kill(member, f"it held up its group for {bound_s:g} s")


def _silent_s(member: Member, now: float) -> float | None:
    """Seconds since a rank that steps with others last answered."""
    if member.last is None or member.heard_at_s is None or member.last.phase in _ALONE:
        return None
    return now - member.heard_at_s
