"""When the faults of a plan strike: so many at once, never at a part that is down, never without load, not for ever."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.chaos import storm as storm_module
from cluster.chaos.plan import Fault, plan
from cluster.chaos.storm import Weather, strike_all


class ScriptedInjector:
    """A fault lasts a few turns of the loop; of each kind there is one victim."""

    def __init__(self) -> None:
        self.struck: list[str] = []
        self.on: set[str] = set()
        self.most_at_once = 0
        self.lasts = 5

    def victims(self, kind: str) -> list[str]:
        return [] if kind in self.on else [kind]

    async def strike(self, fault: Fault) -> None:
        assert fault.kind not in self.on
        self.on.add(fault.kind)
        self.struck.append(fault.kind)
        self.most_at_once = max(self.most_at_once, len(self.on))
        for _ in range(self.lasts):
            await asyncio.sleep(0.001)
        self.on.discard(fault.kind)


class ScriptedLoad:
    num_live = 1


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm_module, "TICK_S", 0.0)
    monkeypatch.setattr(storm_module, "MAX_GAP_S", 0.0)


def weather(**changes: Any) -> Weather:
    return Weather(**{"kinds": (), "kills": 1, "streams": 1, "seed": 0, "seconds": 60.0,
                      "at_once": 2, **changes})  # fmt: skip


async def strike(faults: list[Fault], how: Weather, load: Any = None) -> tuple[Any, int]:
    injector: Any = ScriptedInjector()
    over: list[int] = []
    await strike_all(faults, injector, load or ScriptedLoad(), how, lambda: over.append(1))
    assert not injector.on, "it ends when the last of them is over"
    return injector, len(over)


async def test_all_strike_and_no_more_at_once_than_asked() -> None:
    faults = plan(["rank", "drafter", "allocator", "abort"], 6, seed=4)
    injector, num_over = await strike(faults, weather())
    assert sorted(injector.struck) == sorted(fault.kind for fault in faults)
    assert injector.most_at_once == 2 and num_over == len(faults)


async def test_one_kind_alone_strikes_one_after_the_other() -> None:
    injector, num_over = await strike(plan(["rank"], 5, seed=1), weather(at_once=4))
    assert (injector.most_at_once, num_over) == (1, 5)


async def test_after_each_one_streams_are_left_alone_for_as_long_as_asked() -> None:
    class Timed(ScriptedInjector):
        def __init__(self) -> None:
            super().__init__()
            self.ended_s, self.rests = 0.0, list[float]()

        async def strike(self, fault: Fault) -> None:
            self.rests.append(time.monotonic() - self.ended_s)
            await super().strike(fault)
            self.ended_s = time.monotonic()

    injector: Any = Timed()
    load: Any = ScriptedLoad()
    await strike_all(
        plan(["rank"], 4, seed=1), injector, load, weather(at_once=1, rest_s=0.03), lambda: None
    )
    assert len(injector.rests) == 4 and min(injector.rests[1:]) >= 0.03


async def test_when_the_time_is_over_the_rest_is_left_out() -> None:
    injector, num_over = await strike(plan(["rank"], 5, seed=1), weather(seconds=0.0))
    assert injector.struck == [] and num_over == 0


async def test_nothing_strikes_before_a_stream_flows() -> None:
    load: Any = ScriptedLoad()
    load.num_live = 0
    striking = asyncio.create_task(strike(plan(["rank"], 1, seed=1), weather(), load))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not striking.done()
    load.num_live = 3
    injector, _ = await striking
    assert injector.struck == ["rank"]


async def test_an_error_of_our_own_ends_the_storm() -> None:
    class Failing(ScriptedInjector):
        async def strike(self, fault: Fault) -> None:
            raise LookupError(fault.kind)

    injector: Any = Failing()
    with pytest.raises(LookupError, match="rank"):
        await strike_all(plan(["rank"], 2, 0), injector, ScriptedLoad(), weather(), lambda: None)  # type: ignore[arg-type]
