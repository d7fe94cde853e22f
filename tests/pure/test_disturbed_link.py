"""A link that is disturbed on purpose loses, repeats and delays, as it was told to and no longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.core.messages import AbortRequest
from actors.link import Link, LocalHub
from actors.link.disturbed import Disturbance, DisturbedLink
from tests.link_behaviour import LinkBehaviour


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub() -> LocalHub:
    return LocalHub()


def messages(count: int) -> list[AbortRequest]:
    return [AbortRequest(f"r{i}", 0) for i in range(count)]


class TestALinkWhoseDisturbanceIsOver(LinkBehaviour):
    """It is an ordinary link."""

    @pytest.fixture
    def open_link(self, hub: LocalHub) -> Callable[..., Link]:
        law = Disturbance(0, drop_share=1.0, lasts_s=0.0)
        return lambda name: DisturbedLink(hub.open(name, "target"), law)


def test_messages_out_and_in_are_lost_by_their_share(hub: LocalHub, clock: Clock) -> None:
    sender, receiver = hub.open("a", "target"), hub.open("b", "drafter")
    disturbed = DisturbedLink(sender, Disturbance(1, drop_share=0.5), clock)
    for message in messages(100):
        disturbed.send(receiver.endpoint, message)
        receiver.send(disturbed.endpoint, message)
    num_lost = 0
    for link in (receiver, disturbed):
        arrived = link.poll(0)
        assert 20 < len(arrived) < 80 and len(set(map(str, arrived))) == len(arrived)
        num_lost += 100 - len(arrived)
    assert disturbed.done.num_dropped == num_lost


def test_a_repeated_message_comes_twice_in_a_row(hub: LocalHub, clock: Clock) -> None:
    receiver = hub.open("b", "drafter")
    disturbed = DisturbedLink(hub.open("a", "target"), Disturbance(1, repeat_share=1.0), clock)
    disturbed.send(receiver.endpoint, messages(1)[0])
    assert receiver.poll(0) == messages(1) * 2
    receiver.send(disturbed.endpoint, messages(1)[0])
    assert disturbed.poll(0) == messages(1) * 2


def test_a_late_message_is_overtaken_and_comes_when_it_is_due(hub: LocalHub, clock: Clock) -> None:
    receiver = hub.open("b", "drafter")
    law = Disturbance(3, delay_share=1.0, delay_s=10.0)
    disturbed = DisturbedLink(hub.open("a", "target"), law, clock)
    for message in messages(20):
        disturbed.send(receiver.endpoint, message)
        receiver.send(disturbed.endpoint, message)
    assert disturbed.poll(0) == [] == receiver.poll(0)
    arrived, received = [], []
    for clock.now in range(11):
        arrived += disturbed.poll(0)
        received += receiver.poll(0)
    assert sorted(map(str, arrived)) == sorted(map(str, messages(20)))
    assert sorted(map(str, received)) == sorted(map(str, messages(20)))
    assert received != messages(20), "nothing was overtaken"


def test_a_waiting_poll_ends_in_time_for_what_is_held_back(hub: LocalHub) -> None:
    receiver = hub.open("b", "drafter")
    law = Disturbance(3, delay_share=1.0, delay_s=0.02)
    disturbed = DisturbedLink(hub.open("a", "target"), law)
    disturbed.send(receiver.endpoint, messages(1)[0])
    while not receiver.poll(0):  # `poll(None)` would wait for ever
        disturbed.poll(None)


def test_calm_sends_what_was_held_back_and_tells_what_was_done(hub: LocalHub, clock: Clock) -> None:
    receiver = hub.open("b", "drafter")
    law = Disturbance(3, delay_share=1.0, delay_s=10.0)
    disturbed = DisturbedLink(hub.open("a", "target"), law, clock)
    for message in messages(5):
        disturbed.send(receiver.endpoint, message)
        receiver.send(disturbed.endpoint, message)
    disturbed.poll(0)
    assert disturbed.calm() == {"num_dropped": 5, "num_repeated": 0, "num_delayed": 10}
    assert sorted(map(str, receiver.poll(0))) == sorted(map(str, messages(5)))
    disturbed.send(receiver.endpoint, messages(1)[0])
    assert receiver.poll(0) == messages(1)
