"""What the drill says while it runs: each step with its time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

_started = time.monotonic()


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """One line when it begins, one with its time when it ends."""
    began = time.monotonic()
    _write(f"[{began - _started:6.1f} s] {text}")
    yield
    now = time.monotonic()
    _write(f"[{now - _started:6.1f} s]   done in {now - began:.1f} s")


def say(text: str) -> None:
    """Something worth knowing about the step."""
    _write(f"             {text}")


def foretold(is_so: bool, what: str) -> None:
    """What a measurement should show. Said, not asserted: other work on the machine changes it, and no token."""
    say(f"{'as foretold' if is_so else 'NOT AS FORETOLD (did anything else run?)'}: {what}")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
