"""Links inside one process and over ZeroMQ; what only the encrypted one can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from actors.core.messages import AbortRequest
from actors.link import Link, LocalHub, Membership, ZmqLink
from tests.link_behaviour import LinkBehaviour, commit_batch, receive

MEMBERSHIP = Membership.create()
OpenZmq = Callable[..., ZmqLink]


@pytest.fixture
def open_zmq() -> Iterator[OpenZmq]:
    opened: list[ZmqLink] = []

    def open_one(name: str, membership: Membership = MEMBERSHIP) -> ZmqLink:
        opened.append(ZmqLink(name, "target", membership, "127.0.0.1"))
        return opened[-1]

    yield open_one
    for link in opened:
        link.close()


class TestLocalLink(LinkBehaviour):
    @pytest.fixture
    def open_link(self) -> Callable[..., Link]:
        hub = LocalHub()
        return lambda name: hub.open(name, "target")


class TestZmqLink(LinkBehaviour):
    @pytest.fixture
    def open_link(self, open_zmq: OpenZmq) -> Callable[..., Link]:
        return open_zmq


def test_a_sender_without_the_cluster_key_is_turned_away(open_zmq: OpenZmq) -> None:
    inbox = open_zmq("inbox")
    stranger = open_zmq("stranger", Membership.create())
    stranger.send(inbox.endpoint, AbortRequest("r", 1))
    assert receive(inbox, 1, stranger, within_s=1.0) == []
    assert stranger.counters.num_sent == 0
    member = open_zmq("member")
    member.send(inbox.endpoint, AbortRequest("r", 2))
    assert receive(inbox, 1, member, stranger) == [AbortRequest("r", 2)]


def test_a_sender_does_not_talk_to_an_inbox_with_another_key(open_zmq: OpenZmq) -> None:
    """An impostor on the port of a dead process learns nothing."""
    impostor, other, sender = open_zmq("impostor"), open_zmq("other"), open_zmq("sender")
    expected = replace(impostor.endpoint, public_key=other.endpoint.public_key)
    sender.send(expected, AbortRequest("r", 1))
    assert receive(impostor, 1, sender, within_s=1.0) == []
    assert sender.counters.num_sent == 0


def test_plain_connections_are_refused(open_zmq: OpenZmq) -> None:
    inbox = open_zmq("inbox")
    with zmq.Context() as context, context.socket(zmq.PUSH) as plain:
        plain.linger = 0
        plain.immediate = True
        plain.connect(inbox.endpoint.uri)
        for _ in range(10):
            inbox.poll(0.05)
            with pytest.raises(zmq.Again):
                plain.send(b"hello", zmq.NOBLOCK)


def test_foreign_bytes_from_a_member_are_refused_and_counted(open_zmq: OpenZmq) -> None:
    inbox = open_zmq("inbox")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.curve_serverkey = inbox.endpoint.public_key.encode()
        socket.curve_publickey = MEMBERSHIP.public_key.encode()
        socket.curve_secretkey = MEMBERSHIP.secret_key.encode()
        socket.connect(inbox.endpoint.uri)
        socket.send_multipart([b"no message", b"at all"])
        deadline = time.monotonic() + 5
        while inbox.counters.num_refused == 0 and time.monotonic() < deadline:
            assert inbox.poll(0.05) == []
    assert inbox.counters.num_refused == 1


def test_a_full_queue_drops_and_counts_instead_of_growing(open_zmq: OpenZmq) -> None:
    sender, inbox = open_zmq("sender"), open_zmq("inbox")
    sender.send(inbox.endpoint, AbortRequest("r", 0))
    receive(inbox, 1, sender)
    message = commit_batch(sender.endpoint, 100)  # 120 kB
    num_sent = 0
    while not sender.counters.num_dropped:  # nobody polls the inbox: all buffers fill up
        sender.send(inbox.endpoint, message)
        num_sent += 1
        assert num_sent < 2000
    assert num_sent > 64


def test_a_slow_peer_gets_the_messages_once_it_listens_again(open_zmq: OpenZmq) -> None:
    sender, inbox = open_zmq("sender"), open_zmq("inbox")
    for i in range(100):
        sender.send(inbox.endpoint, AbortRequest("r", i))
        sender.poll(0)
    got = receive(inbox, 100, sender)
    assert got == [AbortRequest("r", i) for i in range(100)]
    assert sender.counters.num_dropped == 0
