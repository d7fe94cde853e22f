"""The supervisor without Ray: what it says before it has heard of anybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.rollout_plan import Bounds
from actors.link import Membership
from actors.peers import Description
from cluster.rollout import Wish
from cluster.routing import MISSES_UNTIL_DEAD, Member
from cluster.supervisor import Supervisor
from configs.change import FixedSettingError, PolicyOrder
from configs.load import load
from configs.schema import ClusterConfig
from tests.pure.test_routing import MEMBERS, describe


class Answering(Supervisor):
    """Its members answer after `delay_s`; those named silent never do."""

    delay_s = 0.05
    silent: frozenset[str] = frozenset()
    deaf: frozenset[str] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: dict[str, PolicyOrder | None] = {}

    async def _ask(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        if method == "connect":
            if name in self.deaf:
                raise TimeoutError
            self.told[name] = arguments[0].order
            return None
        if name in self.silent:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        await asyncio.sleep(self.delay_s)
        answer: Description = describe(name)
        return answer


def supervisor() -> Answering:
    return Answering(MEMBERS, Membership.create(), "127.0.0.1", "dspark", ClusterConfig())


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


def test_a_rank_that_is_given_up_although_it_lives_is_named_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.supervisor.PING_TIMEOUT_S", 0.0)

    async def silence() -> Member:
        watching = supervisor()
        watching.delay_s = 0.0
        member = watching._book.members["target-1"]
        await watching._ping(member)
        watching.silent = frozenset({"target-1"})
        for _ in range(MISSES_UNTIL_DEAD + 2):
            await watching._ping(member)
        return member

    member = asyncio.run(silence())
    assert (member.state, member.num_silences) == ("dead", 1)
    assert caplog.text.count("target-1 is given up until it answers: does not answer") == 1


def wanted(*settings: str) -> ClusterConfig:
    config = ClusterConfig().model_dump()
    for setting in settings:
        section, field = setting.split("=")[0].split(".")
        config[section][field] = load(overrides=[setting]).model_dump()[section][field]
    return ClusterConfig.model_validate(config)


def test_a_policy_is_changed_in_the_running_cluster_and_whoever_was_deaf_is_named() -> None:
    async def change() -> None:
        watching = supervisor()
        watching.deaf = frozenset({"target-1"})
        answer = await watching.reconfigure(wanted("policy.name=none"))
        assert answer["late"] == ["target-1"]
        assert answer["told"] == ["allocator", "target-0"]
        order = watching.told["target-0"]
        assert order is not None and order.number == answer["number"]
        assert order.policy.name == "none" and (await watching.status())["policy"] == "none"

    asyncio.run(change())


def test_what_only_a_restart_can_change_is_refused_and_nothing_changes() -> None:
    async def change() -> str:
        watching = supervisor()
        with pytest.raises(FixedSettingError) as refused:
            await watching.reconfigure(wanted("policy.name=none", "model.drafter=ngram"))
        assert (await watching.status())["policy"] == "lagged"
        return str(refused.value)

    message = asyncio.run(change())
    assert "model.drafter ('bundled' → 'ngram')" in message and "restart" in message


def test_a_policy_that_is_rolled_out_reaches_every_rank_and_the_allocator() -> None:
    async def roll() -> None:
        watching = supervisor()
        over = await watching.rollout(Wish(wanted("policy.name=none"), None, Bounds()))
        assert over["outcome"] == "done"
        orders = {name: watching.told[name] for name in ("allocator", "target-0", "target-1")}
        assert [order and order.policy.name for order in orders.values()] == ["none"] * 3

    asyncio.run(roll())
