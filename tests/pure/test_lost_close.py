"""Word that a request is over gets lost on its way to the drafter: the context is dropped when the rank falls idle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from actors.core.messages import CloseDraft, StepReport
from actors.drafter import DrafterActor
from actors.link import Membership, ZmqLink
from actors.shell import Seat
from tests import ray_fakes
from tests.link_behaviour import receive
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import ALLOCATOR, DRAFTER
from tests.pure.test_shell import CONFIG, commit, until, until_ready

MEMBERSHIP = Membership.create()
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def client() -> Iterator[ZmqLink]:
    link = ZmqLink("client", "ingress", MEMBERSHIP, "127.0.0.1")
    yield link
    link.close()


@pytest.fixture
def drafter() -> Iterator[Any]:
    seat = Seat("drafter-0", MEMBERSHIP, "127.0.0.1")
    shell: Any = DrafterActor(
        seat, CONFIG, ray_fakes.FakeDrafter, on_failure=lambda was_ready, cause: None
    )
    yield shell
    asyncio.run(shell.stop())


@pytest.mark.parametrize("has_allocator", [True, False])
def test_a_rank_that_falls_idle_tells_its_drafters_once(has_allocator: bool) -> None:
    session = Session(make_rank(), error=0.0)
    session.rank.allocator = ALLOCATOR if has_allocator else None
    session.submit(admitted("a", PROMPT, 9))
    assert session.rank.report_idle() == []
    session.run()
    assert session.rank.report is not None
    next_step = session.rank.report.step + 1
    out = session.rank.report_idle()
    assert out[0] == (DRAFTER, CloseDraft("target-0", (), before_step=next_step))
    assert [type(message) for _, message in out[1:]] == [StepReport] * has_allocator
    assert session.rank.report_idle() == []
    session.submit(admitted("b", PROMPT, 9))
    session.run()
    assert session.rank.report_idle()[0][0] == DRAFTER


def test_a_drafter_forgets_what_an_idle_rank_told_of_before_and_nothing_else(
    drafter: Any, client: ZmqLink
) -> None:
    address = until_ready(drafter).endpoint
    rank = replace(client.endpoint, role="target")
    other = replace(rank, name="another")
    for request_id, owner, step in (("lost", rank, 4), ("new", rank, 9), ("others", other, 4)):
        client.send(address, replace(commit(owner, request_id), step=step))
        receive(client, 1)
    client.send(address, CloseDraft(rank.name, (), before_step=9))

    def stats() -> dict[str, Any]:
        told: dict[str, Any] = asyncio.run(drafter.stats())
        return told

    until(lambda: client.poll(0.01) or stats()["num_missed_closes"])
    assert (stats()["num_missed_closes"], stats()["open_requests"]) == (1, 2)
    client.send(address, CloseDraft(rank.name, ("new",)))  # as ever: nobody else is meant
    until(lambda: client.poll(0.01) or stats()["open_requests"] == 1)
    assert stats()["num_missed_closes"] == 1
