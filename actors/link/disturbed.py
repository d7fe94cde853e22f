"""A link that loses, repeats and delays messages on purpose, for drills: receivers survive that (C4, C12)."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from actors.core.messages import Endpoint, Message
from actors.link.base import Link


@dataclass(frozen=True)
class Disturbance:
    """What happens to a message, sent or received; shares are probabilities.

    Attributes:
        delay_s: longest time a late message is held back, in seconds; others overtake it.
        lasts_s: after so many seconds the link is as good as new.
    """

    seed: int
    drop_share: float = 0.0
    repeat_share: float = 0.0
    delay_share: float = 0.0
    delay_s: float = 0.0
    lasts_s: float = float("inf")


@dataclass
class DisturbanceCounters:
    """What was done to messages."""

    num_dropped: int = 0
    num_repeated: int = 0
    num_delayed: int = 0


class DisturbedLink:
    """See `Link`. `poll` may return early with nothing: a held message had to be sent.

    Args:
        link: the real one.
        disturbance: what to do.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        link: Link,
        disturbance: Disturbance,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = link
        self.endpoint, self.counters = link.endpoint, link.counters
        self.done = DisturbanceCounters()
        self._law = disturbance
        self._clock = clock
        self._ends_at = clock() + disturbance.lasts_s
        self._rng = random.Random(disturbance.seed)
        self._order = itertools.count()
        # (due, order, receiver or None for our own, message)
        self._held: list[tuple[float, int, Endpoint | None, Message]] = []
        self._lock = threading.Lock()  # any thread may send

    def send(self, to: Endpoint, message: Message) -> None:
        for _ in range(self._copies(to, message)):
            self.inner.send(to, message)

    def poll(self, timeout_s: float | None) -> list[Message]:
        arrived = self._release()
        received = self.inner.poll(0 if arrived else self._patience(timeout_s))
        for message in received:
            arrived += [message] * self._copies(None, message)
        return arrived + self._release()

    def lost(self) -> list[Endpoint]:
        return self.inner.lost()

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()

    def calm(self) -> dict[str, int]:
        """Send what was held back for others and be an ordinary link from now on; returns what was done until then.

        On the polling thread, as `poll`. What was held back for ourselves counts as lost.
        """
        with self._lock:
            self._ends_at = float("-inf")
            held, self._held = sorted(self._held, key=_due), []
            self.done.num_dropped += sum(to is None for _, _, to, _ in held)
        for _, _, to, message in held:
            if to is not None:
                self.inner.send(to, message)
        return asdict(self.done)

    def _copies(self, to: Endpoint | None, message: Message) -> int:
        """How often the message goes on now: not at all when it is lost, or held back."""
        law = self._law
        with self._lock:
            now = self._clock()
            if now >= self._ends_at:
                return 1
            draw = self._rng.random()
            if draw < law.drop_share:
                self.done.num_dropped += 1
                return 0
            draw -= law.drop_share
            if draw < law.repeat_share:
                self.done.num_repeated += 1
                return 2
            if draw - law.repeat_share < law.delay_share:
                self.done.num_delayed += 1
                due = now + self._rng.random() * law.delay_s
                heapq.heappush(self._held, (due, next(self._order), to, message))
                return 0
            return 1

    def _release(self) -> list[Message]:
        """Send what is due; returns what is due for ourselves."""
        due: list[tuple[Endpoint | None, Message]] = []
        with self._lock:
            now = self._clock()
            while self._held and self._held[0][0] <= now:
                _, _, to, message = heapq.heappop(self._held)
                due.append((to, message))
        for to, message in due:
            if to is not None:
                self.inner.send(to, message)
        return [message for to, message in due if to is None]

    def _patience(self, timeout_s: float | None) -> float | None:
        with self._lock:
            if not self._held:
                return timeout_s
            wait_s = max(0.0, self._held[0][0] - self._clock())
        return wait_s if timeout_s is None else min(timeout_s, wait_s)


def _due(held: tuple[float, int, Endpoint | None, Message]) -> tuple[float, int]:
    return held[0], held[1]
