"""Actors of a drill can be disturbed and go on as before; those of an ordinary cluster have no handle for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from actors.drafter import DrafterActor
from actors.drills import DrilledAllocator, DrilledDrafter, DrilledTarget
from actors.link import Membership, ZmqLink
from actors.link.disturbed import Disturbance, DisturbedLink
from actors.shell import Seat
from cluster.members import _classes
from configs.schema import ClusterConfig
from tests import ray_fakes
from tests.pure.test_shell import CONFIG, commit, until, until_ready

MEMBERSHIP = Membership.create()


@pytest.fixture
def client() -> Iterator[ZmqLink]:
    link = ZmqLink("client", "target", MEMBERSHIP, "127.0.0.1")
    yield link
    link.close()


@pytest.fixture
def drafter() -> Iterator[Any]:
    seat = Seat("drafter-0", MEMBERSHIP, "127.0.0.1")
    shell: Any = DrilledDrafter(
        seat, CONFIG, ray_fakes.FakeDrafter, on_failure=lambda was_ready, cause: None
    )
    yield shell
    asyncio.run(shell.stop())


def test_only_a_drill_starts_actors_that_can_be_disturbed() -> None:
    drill = ClusterConfig.model_validate({"link": {"drills": True}})
    assert _classes(drill) == (DrilledAllocator, DrilledDrafter, DrilledTarget)
    ordinary = _classes(ClusterConfig())
    assert ordinary[1] is DrafterActor
    assert not any(hasattr(each, "disturb") or hasattr(each, "shift_clock") for each in ordinary)


def test_a_disturbed_actor_misses_messages_and_a_calmed_one_is_as_before(
    drafter: Any, client: ZmqLink
) -> None:
    address = until_ready(drafter).endpoint
    link = drafter.link
    asyncio.run(drafter.disturb(Disturbance(0, drop_share=1.0)))
    client.send(address, commit(client.endpoint, "lost"))
    until(lambda: client.poll(0.01) or drafter.link.done.num_dropped)
    asyncio.run(drafter.disturb(Disturbance(0, delay_share=1.0, delay_s=60.0)))  # in place of it
    assert drafter.link.inner is link
    client.send(address, commit(client.endpoint, "late"))
    until(lambda: client.poll(0.01) or drafter.link.done.num_delayed)
    assert asyncio.run(drafter.calm()) == {"num_dropped": 1, "num_repeated": 0, "num_delayed": 1}
    assert drafter.link is link and not isinstance(link, DisturbedLink)
    client.send(address, commit(client.endpoint, "r"))
    (answer,) = until(lambda: client.poll(0.05))
    assert answer.request_ids == ("r",)
    assert asyncio.run(drafter.calm()) == {}


def test_a_clock_that_jumps_is_set_right_again_and_waits_for_nobody(
    drafter: Any, client: ZmqLink
) -> None:
    address = until_ready(drafter).endpoint
    true, true_ns, before = time.time, time.time_ns, time.time()
    asyncio.run(drafter.shift_clock(-7200.0))
    try:
        assert time.time() < before - 7000 and time.time_ns() < (before - 7000) * 1e9
        client.send(address, replace(commit(client.endpoint, "r"), step=1))
        (answer,) = until(lambda: client.poll(0.05))
        assert answer.request_ids == ("r",)
    finally:
        asyncio.run(drafter.shift_clock(0.0))
    assert (time.time, time.time_ns) == (true, true_ns)
