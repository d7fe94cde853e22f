"""The same messages over plain Ray actor calls: thirty times slower than ZeroMQ, and nothing to open or to key.

Every process owns a mailbox: an actor shell is its own (it has a `deliver` method), any other process starts a small
mailbox actor and empties it from a thread. Ray authenticates the callers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from typing import Any

import ray
from ray.exceptions import RayError

from actors.core.messages import Endpoint, Message
from actors.link.base import LinkCounters, Role, new_epoch
from actors.link.codec import encode
from actors.link.local import Mailbox

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256  # calls to one peer that have not returned
RETRY_LOOKUP_S = 1.0
MAILBOX_POLL_S = 5.0


class ActorMailbox:
    """The mailbox actor of a process that is no actor of ours (an ingress replica, a test)."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[tuple[str, list[bytes]]] = asyncio.Queue(4096)

    async def deliver(self, epoch: str, frames: list[bytes]) -> bool:
        try:
            self._arrived.put_nowait((epoch, frames))
        except asyncio.QueueFull:
            return False
        return True

    async def take(self, timeout_s: float) -> list[tuple[str, list[bytes]]]:
        """What has arrived, waiting up to `timeout_s` for the first."""
        try:
            taken = [await asyncio.wait_for(self._arrived.get(), timeout_s)]
        except TimeoutError:
            return []
        while not self._arrived.empty():
            taken.append(self._arrived.get_nowait())
        return taken


class _Peer:
    """The handle of a peer's mailbox and the calls to it that are under way."""

    def __init__(self, to: Endpoint) -> None:
        self.to = to
        self.handle: Any = None
        self.next_lookup = 0.0
        self.in_flight: deque[Any] = deque()

    def find(self) -> bool:
        now = time.monotonic()
        if self.handle is None and now >= self.next_lookup:
            namespace, name = self.to.uri.removeprefix("actor://").split("/", 1)
            try:
                self.handle = ray.get_actor(name, namespace=namespace)
            except (ValueError, RayError):
                self.next_lookup = now + RETRY_LOOKUP_S
        return self.handle is not None

    def settle(self) -> int:
        """Forget the calls that have returned; the number of messages that did not arrive."""
        num_lost = 0
        done, pending = ray.wait(
            list(self.in_flight), num_returns=len(self.in_flight), timeout=0, fetch_local=True
        )
        for call in done:
            try:
                num_lost += not ray.get(call)
            except RayError:
                num_lost += 1
                self.handle = None  # look again: the actor may be restarting
        self.in_flight = deque(pending)
        return num_lost


class ActorLink:
    """See `Link`.

    Args:
        name: unique in the cluster, stable over restarts.
        role: what this process is.
        own_actor: "namespace/name" of this process when it is a named actor with
            `deliver(epoch, frames) -> bool` that calls ours; None starts a mailbox actor.
    """

    def __init__(self, name: str, role: Role, own_actor: str | None = None) -> None:
        epoch = new_epoch()
        self.counters = LinkCounters()
        self._mailbox = Mailbox(self.counters)
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, Endpoint] = {}
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._remote: Any = None
        self._feeder = threading.Thread(target=self._feed, name="link-feeder", daemon=True)
        address = own_actor or self._start_mailbox(f"mailbox-{name}-{epoch}")
        self.endpoint = Endpoint(name, role, f"actor://{address}", "", epoch)
        if own_actor is None:
            self._feeder.start()

    def deliver(self, epoch: str, frames: list[bytes]) -> bool:
        """What the shell's `deliver` calls. False: full, closed, or meant for an earlier incarnation."""
        if epoch != self.endpoint.epoch:
            self.counters.num_refused += 1
            return False
        return self._mailbox.put(frames)

    def send(self, to: Endpoint, message: Message) -> None:
        frames = encode(message)
        with self._sending:
            num_lost = self._send(to, frames)
            self.counters.num_dropped += num_lost
            if num_lost:
                self._lost[to.name] = to

    def _send(self, to: Endpoint, frames: list[bytes]) -> int:
        """The number of messages, this one and earlier ones, that turned out to be lost."""
        peer = self._peers.get(to.name)
        if peer is None or peer.to != to:
            self._peers[to.name] = peer = _Peer(to)
        num_lost = peer.settle() if peer.in_flight else 0
        if self._closed.is_set() or len(peer.in_flight) >= MAX_IN_FLIGHT or not peer.find():
            return num_lost + 1
        peer.in_flight.append(peer.handle.deliver.remote(to.epoch, frames))
        self.counters.num_sent += 1
        return num_lost

    def lost(self) -> list[Endpoint]:
        with self._sending:
            lost, self._lost = self._lost, {}
        return list(lost.values())

    def poll(self, timeout_s: float | None) -> list[Message]:
        return self._mailbox.take(timeout_s)

    def wake(self) -> None:
        self._mailbox.wake()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._mailbox.close()
        if self._remote is not None:
            ray.kill(self._remote)
            self._feeder.join()

    def _start_mailbox(self, name: str) -> str:
        namespace = ray.get_runtime_context().namespace
        self._remote = ray.remote(ActorMailbox).options(name=name, num_cpus=0).remote()
        return f"{namespace}/{name}"

    def _feed(self) -> None:
        while not self._closed.is_set():
            try:
                taken = ray.get(self._remote.take.remote(MAILBOX_POLL_S))
            except RayError as error:
                if not self._closed.is_set():
                    log.error("the mailbox of %s is gone: %s", self.endpoint.name, error)
                return
            for epoch, frames in taken:
                if not self.deliver(epoch, frames):
                    self.counters.num_refused += 1
