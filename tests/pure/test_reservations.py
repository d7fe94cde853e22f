"""A rank is asked for room until it answers; what was asked of one that does not is undone."""

from __future__ import annotations

import asyncio

import pytest

from actors.core.messages import AbortRequest, Message, ReservationReply, Reserve
from actors.core.sampling import SamplingParams
from actors.link import LocalHub, LocalLink
from cluster import reservations
from cluster.reservations import ReservationDesk
from cluster.streams import StreamJournal, StreamOrder


@pytest.fixture
def links() -> tuple[LocalLink, LocalLink]:
    """Of the ingress, and of a rank."""
    hub = LocalHub()
    return hub.open("ingress", "ingress"), hub.open("target-0", "target")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "REPEAT_S", 0.01)


def journal() -> StreamJournal:
    return StreamJournal(StreamOrder("r", (1, 2, 3), 10, SamplingParams()))


async def next_message(link: LocalLink) -> Message:
    while not (messages := link.poll(0)):
        await asyncio.sleep(0)
    return messages[0]


async def test_a_lost_question_or_answer_is_asked_again(links: tuple[LocalLink, LocalLink]) -> None:
    ingress, rank = links
    desk = ReservationDesk(ingress, timeout_s=30.0)
    asking = asyncio.create_task(desk.ask(rank.endpoint, journal()))
    lost, again = await next_message(rank), await next_message(rank)
    assert lost == again == Reserve("r", ingress.endpoint, 3, 10)
    reply = ReservationReply("target-0", "r", granted=True)
    desk.take(reply)
    desk.take(reply)  # to the question that had seemed lost
    assert await asking == reply
    await asyncio.sleep(0.03)
    assert not [m for m in rank.poll(0) if m != lost], "nothing is undone"


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_rank_that_never_answers_is_given_up_and_told_so(
    links: tuple[LocalLink, LocalLink], is_lost: bool
) -> None:
    ingress, rank = links
    desk = ReservationDesk(ingress, timeout_s=30.0 if is_lost else 0.05)
    asking = asyncio.create_task(desk.ask(rank.endpoint, journal()))
    await next_message(rank)
    if is_lost:
        desk.give_up_on(lambda endpoint: endpoint == rank.endpoint)
    assert await asking is None
    assert rank.poll(0)[-1] == AbortRequest("r", -1)


async def test_a_client_that_leaves_while_a_rank_is_asked_undoes_it(
    links: tuple[LocalLink, LocalLink],
) -> None:
    ingress, rank = links
    desk = ReservationDesk(ingress, timeout_s=30.0)
    asking = asyncio.create_task(desk.ask(rank.endpoint, journal()))
    await next_message(rank)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert rank.poll(0)[-1] == AbortRequest("r", -1)
