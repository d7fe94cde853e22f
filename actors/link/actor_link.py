"""The same messages over plain Ray actor calls: thirty times slower than ZeroMQ, and nothing to open or to key.

Every process owns a mailbox: an actor shell is its own (it has a `deliver` method), any other process starts a small
mailbox actor and empties it from a thread. Ray authenticates the callers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from actors.core.messages import Endpoint, Message
from actors.link.base import LinkCounters, Role, new_epoch
from actors.link.codec import encode
from actors.link.local import Frames, Mailbox

log = logging.getLogger(__name__)

MAX_QUEUED = 256  # messages for one peer that wait for the call before them
CALL_TIMEOUT_S = 10.0
MAILBOX_POLL_S = 5.0


class ActorMailbox:
    """The mailbox actor of a process that is no actor of ours (an ingress replica, a test)."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[tuple[str, list[Frames]]] = asyncio.Queue(MAX_QUEUED)

    async def deliver(self, epoch: str, batch: list[Frames]) -> int:
        try:
            self._arrived.put_nowait((epoch, batch))
        except asyncio.QueueFull:
            return 0
        return len(batch)

    async def take(self, timeout_s: float) -> list[tuple[str, list[Frames]]]:
        """What has arrived, waiting up to `timeout_s` for the first."""
        try:
            taken = [await asyncio.wait_for(self._arrived.get(), timeout_s)]
        except TimeoutError:
            return []
        while not self._arrived.empty():
            taken.append(self._arrived.get_nowait())
        return taken


class _Courier(threading.Thread):
    """Brings the messages for one peer, in order: one call at a time, with all that has gathered meanwhile."""

    def __init__(self, to: Endpoint, report: Callable[[_Courier, int, int], None]) -> None:
        super().__init__(name=f"link-to-{to.name}", daemon=True)
        self.to = to
        self._report = report
        self._handle: Any = None
        self._queue: deque[Frames] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.start()

    def put(self, frames: Frames) -> bool:
        with self._changed:
            if self._closed or len(self._queue) >= MAX_QUEUED:
                return False
            self._queue.append(frames)
            self._changed.notify()
        return True

    def close(self) -> int:
        """The number of messages that will not leave any more."""
        with self._changed:
            self._closed = True
            num_left = len(self._queue)
            self._queue.clear()
            self._changed.notify()
        return num_left

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                batch = list(self._queue)
                self._queue.clear()
            num_arrived = self._bring(batch)
            self._report(self, num_arrived, len(batch) - num_arrived)

    def _bring(self, batch: list[Frames]) -> int:
        namespace, name = self.to.uri.removeprefix("actor://").split("/", 1)
        try:
            if self._handle is None:
                self._handle = ray.get_actor(name, namespace=namespace)
            call = self._handle.deliver.remote(self.to.epoch, batch)
            return int(ray.get(call, timeout=CALL_TIMEOUT_S))
        except (ValueError, RayError) as error:  # ValueError: no actor of that name
            log.info("%s takes no messages: %s", name, error)
            self._handle = None
            return 0


class ActorLink:
    """See `Link`.

    Args:
        name: unique in the cluster, stable over restarts.
        role: what this process is.
        own_actor: "namespace/name" of this process when it is a named actor with
            `deliver(epoch, batch) -> int` that calls ours; None starts a mailbox actor.
    """

    def __init__(self, name: str, role: Role, own_actor: str | None = None) -> None:
        epoch = new_epoch()
        self.counters = LinkCounters()
        self._mailbox = Mailbox(self.counters)
        self._couriers: dict[str, _Courier] = {}
        self._lost: dict[str, Endpoint] = {}
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self._remote: Any = None
        self._feeder = threading.Thread(target=self._feed, name="link-feeder", daemon=True)
        address = own_actor or self._start_mailbox(f"mailbox-{name}-{epoch}")
        self.endpoint = Endpoint(name, role, f"actor://{address}", "", epoch)
        if own_actor is None:
            self._feeder.start()

    def deliver(self, epoch: str, batch: list[Frames]) -> int:
        """What the shell's `deliver` calls. The number of messages taken: none that are for another incarnation."""
        if epoch != self.endpoint.epoch:
            self.counters.num_refused += len(batch)
            return 0
        return sum(self._mailbox.put(frames) for frames in batch)

    def send(self, to: Endpoint, message: Message) -> None:
        frames = encode(message)
        with self._counting:
            courier = self._couriers.get(to.name)
            if not self._closed.is_set() and (courier is None or courier.to != to):
                if courier is not None:
                    self.counters.num_dropped += courier.close()
                self._couriers[to.name] = courier = _Courier(to, self._count)
            if courier is None or not courier.put(frames):
                self.counters.num_dropped += 1
                self._lost[to.name] = to

    def _count(self, courier: _Courier, num_arrived: int, num_lost: int) -> None:
        with self._counting:
            self.counters.num_sent += num_arrived
            self.counters.num_dropped += num_lost
            if num_lost and self._couriers.get(courier.to.name) is courier:
                self._lost[courier.to.name] = courier.to

    def lost(self) -> list[Endpoint]:
        with self._counting:
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
        with self._counting:
            for courier in self._couriers.values():
                self.counters.num_dropped += courier.close()
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
            for epoch, batch in taken:
                self.deliver(epoch, batch)
