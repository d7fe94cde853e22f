"""Links inside one process: the same bytes, no sockets. Also the mailbox that the actor link is fed through."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from actors.core.messages import Endpoint, Message
from actors.link.base import LinkCounters, Role, new_epoch
from actors.link.codec import RefusedMessageError, decode, encode

log = logging.getLogger(__name__)

Frames = Sequence[bytes | bytearray | memoryview]


class Mailbox:
    """A bounded queue of undecoded messages that one thread empties."""

    def __init__(self, counters: LinkCounters, max_queued: int = 4096) -> None:
        self._counters = counters
        self._max_queued = max_queued
        self._queue: deque[Frames] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._closed = False

    def put(self, frames: Frames) -> bool:
        """False when the mailbox is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._max_queued:
                return False
            self._queue.append(frames)
            self._changed.notify()
        return True

    def take(self, timeout_s: float | None) -> list[Message]:
        with self._changed:
            if not self._queue and not self._woken and timeout_s != 0:
                self._changed.wait_for(lambda: self._queue or self._woken, timeout_s)
            self._woken = False
            taken = list(self._queue)
            self._queue.clear()
        return decode_all(taken, self._counters)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._woken = True
            self._changed.notify()


def decode_all(received: list[Frames], counters: LinkCounters) -> list[Message]:
    """Decode what can be decoded; refuse, log and count the rest."""
    decoded: list[Message] = []
    for frames in received:
        try:
            decoded.append(decode(frames))
        except RefusedMessageError as error:
            counters.num_refused += 1
            log.warning("refused a message (%d so far): %s", counters.num_refused, error)
    counters.num_received += len(decoded)
    return decoded


class LocalHub:
    """Where the local links of one test find each other."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Mailbox] = {}

    def open(self, name: str, role: Role) -> LocalLink:
        """Bind an inbox under `name`."""
        return LocalLink(self, name, role)

    def attach(self, uri: str, mailbox: Mailbox) -> None:
        self._inboxes[uri] = mailbox

    def detach(self, uri: str) -> None:
        self._inboxes.pop(uri, None)

    def deliver(self, uri: str, frames: Frames) -> bool:
        mailbox = self._inboxes.get(uri)
        return mailbox is not None and mailbox.put(frames)


class LocalLink:
    """A link to the other local links of one `LocalHub`."""

    def __init__(self, hub: LocalHub, name: str, role: Role) -> None:
        epoch = new_epoch()
        self.endpoint = Endpoint(name, role, f"local://{name}/{epoch}", "", epoch)
        self.counters = LinkCounters()
        self._hub = hub
        self._mailbox = Mailbox(self.counters)
        self._closed = False
        self._lost: dict[str, Endpoint] = {}
        hub.attach(self.endpoint.uri, self._mailbox)

    def send(self, to: Endpoint, message: Message) -> None:
        if not self._closed and self._hub.deliver(to.uri, encode(message)):
            self.counters.num_sent += 1
        else:
            self.counters.num_dropped += 1
            self._lost[to.name] = to

    def lost(self) -> list[Endpoint]:
        lost, self._lost = self._lost, {}
        return list(lost.values())

    def poll(self, timeout_s: float | None) -> list[Message]:
        return self._mailbox.take(timeout_s)

    def wake(self) -> None:
        self._mailbox.wake()

    def close(self) -> None:
        self._closed = True
        self._hub.detach(self.endpoint.uri)
        self._mailbox.close()
