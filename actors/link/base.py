"""What every link can do, and the key that makes a process a member of the cluster."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Literal, Protocol

import zmq

from actors.core.messages import Endpoint, Message

Role = Literal["target", "drafter", "allocator", "ingress", "supervisor"]


def new_epoch() -> str:
    """A fresh name for this incarnation of a process."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Membership:
    """The CURVE key pair all members send with; an inbox accepts nobody else. Handed out by Ray, never logged."""

    public_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def create(cls) -> Membership:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass
class LinkCounters:
    """What became of the messages of one link; every count only grows."""

    num_sent: int = 0
    num_received: int = 0
    num_dropped: int = 0  # not sent: the peer is gone or its queue is full
    num_refused: int = 0  # received, but not one of our messages or for another incarnation


class Link(Protocol):
    """One inbox, and a way to every other inbox of the cluster.

    One thread polls. `send` and `wake` may be called from any thread; a message sent by another thread than the
    polling one leaves with the next `poll`, which is woken for it.
    """

    @property
    def endpoint(self) -> Endpoint:
        """Its inbox, as others know it."""
        ...

    @property
    def counters(self) -> LinkCounters:
        """What happened to messages here."""
        ...

    def send(self, to: Endpoint, message: Message) -> None:
        """Send, or drop and count. Never blocks and never raises because of the peer."""
        ...

    def poll(self, timeout_s: float | None) -> list[Message]:
        """Every message that has arrived, in the order of each sender.

        Waits up to `timeout_s` for the first (0: not at all, None: until one comes or `wake` is called); an empty
        list means that time ran out or that somebody called `wake`.
        """
        ...

    def lost(self) -> list[Endpoint]:
        """Peers that stopped taking messages since the last call; a peer that takes them again may be lost again."""
        ...

    def wake(self) -> None:
        """End a waiting `poll` from another thread."""
        ...

    def close(self) -> None:
        """Stop receiving and forget all peers; unsent messages are dropped. Idempotent."""
        ...
