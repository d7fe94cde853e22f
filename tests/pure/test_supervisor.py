"""The supervisor without Ray: what it says before it has heard of anybody."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.link import Membership
from actors.shell import Description
from cluster.supervisor import Supervisor
from tests.pure.test_routing import MEMBERS, describe


class Answering(Supervisor):
    """Its members answer after `delay_s`; those named silent never do."""

    delay_s = 0.05
    silent: frozenset[str] = frozenset()

    async def _ask(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        if method == "connect":
            return None
        if name in self.silent:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        await asyncio.sleep(self.delay_s)
        answer: Description = describe(name)
        return answer


def supervisor() -> Answering:
    return Answering(MEMBERS, Membership.create(), "127.0.0.1", "dspark")


def test_a_supervisor_that_has_just_started_asks_before_it_publishes() -> None:
    async def first_table() -> list[str]:
        return [route.state for route in (await supervisor().routing()).ranks]

    assert asyncio.run(first_table()) == ["ready", "ready"]


def test_one_silent_member_does_not_keep_the_first_table_back_for_ever() -> None:
    async def first_table() -> list[str]:
        watching = supervisor()
        watching.silent = frozenset({"target-1"})
        table = await asyncio.wait_for(watching.routing(), 10)
        return [route.state for route in table.ranks]

    assert asyncio.run(first_table()) == ["ready", "starting"]
