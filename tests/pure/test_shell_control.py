"""Control calls whose callers do not wait any more do the loop no harm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from actors.link import Membership
from actors.peers import Seat
from actors.shell import Shell


class Slow(Shell):
    """Its turns last until they are let go."""

    role = "target"

    def __init__(self, failures: list[str]) -> None:
        seat = Seat("target-0", Membership.create(), "127.0.0.1")
        super().__init__(seat, "zmq", on_failure=lambda _ready, cause: failures.append(cause))
        self.let_go = threading.Event()
        self.in_turn = threading.Event()
        self.start()

    def turn(self) -> None:
        self.in_turn.set()
        self.let_go.wait(10)
        self.link.poll(0.01)


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def shell(failures: list[str]) -> Iterator[Any]:
    shell = Slow(failures)
    yield shell
    shell.let_go.set()
    asyncio.run(shell.stop())


def test_a_caller_that_gave_up_during_a_long_turn_does_not_end_the_process(
    shell: Any, failures: list[str]
) -> None:
    done: list[str] = []

    async def ask_and_leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shell.on_loop(lambda: done.append("left")), 0.05)

    assert shell.in_turn.wait(10)
    asyncio.run(ask_and_leave())
    shell.let_go.set()
    asyncio.run(shell.on_loop(lambda: done.append("stayed")))
    assert done == ["stayed"] and failures == []
