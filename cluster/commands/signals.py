"""SIGINT and SIGTERM mean the same to every command: end in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt inside the block; the earlier handlers return afterwards."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def on_signal(action: Callable[[], object]) -> None:
    """From now on both signals call `action` instead."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        action()

    for number in SIGNALS:
        signal.signal(number, handle)
