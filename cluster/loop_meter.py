"""What an ingress replica measures of itself: how busy its event loop is, and how late."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_S, WINDOW_S = 0.1, 5.0


class LoopMeter:
    """Looks ten times a second, from the loop that serves; everything it tells is of the last seconds."""

    def __init__(self) -> None:
        # (wall clock, CPU seconds of the loop's thread, lateness of this look), oldest first
        self._looks: deque[tuple[float, float, float]] = deque(maxlen=round(WINDOW_S / TICK_S))

    async def run(self) -> None:
        """Until it is cancelled; on the loop and thread that are to be measured."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.note(now, time.thread_time(), max(0.0, now - due))

    def note(self, now: float, cpu_s: float, lag_s: float) -> None:
        """One look: the wall clock, the thread's CPU seconds so far, and by how much the loop came too late."""
        self._looks.append((now, cpu_s, lag_s))

    def stats(self) -> dict[str, float]:
        """`busy_share` of a core, and `lag_s`, the mean; zeros before the second look."""
        if len(self._looks) < 2:
            return {"busy_share": 0.0, "lag_s": 0.0}
        (first, first_cpu_s, _), (last, last_cpu_s, _) = self._looks[0], self._looks[-1]
        lags = [lag_s for _, _, lag_s in self._looks]
        return {
            "busy_share": (last_cpu_s - first_cpu_s) / max(last - first, 1e-9),
            "lag_s": sum(lags) / len(lags),
        }
