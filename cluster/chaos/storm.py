"""One storm over one running cluster: learn, load, strike, calm down, look for what was left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from cluster.chaos.history import Event, History
from cluster.chaos.inject import Injector
from cluster.chaos.load import Load, make_requests
from cluster.chaos.plan import Fault, next_possible
from cluster.chaos.view import ClusterView

LOAD_WITHIN_S = 120.0
TICK_S = 0.1
MAX_GAP_S = 3.0
CROWD = 2  # streams that a `memory` fault adds, as a multiple of those that are open anyway


@dataclass(frozen=True)
class Weather:
    """What a storm is like.

    Attributes:
        seed: of the plan and the load.
        kills: faults of each kind.
        seconds: after so long no further fault strikes.
        at_once: faults that may be on at the same time.
        rest_s: seconds without another fault after each one is over: time for streams to get on.
    """

    kinds: tuple[str, ...]
    kills: int
    streams: int
    seed: int
    seconds: float
    at_once: int
    rest_s: float = 0.0


async def storm(
    endpoint: str,
    model: str,
    weather: Weather,
    faults: Sequence[Fault],
    settings: dict[str, Any],
    file: TextIO,
    progress: Callable[[], object],
) -> list[Event]:
    """Run it and return its history.

    Args:
        endpoint: URL of the API of a cluster that this process has started.
        faults: the plan.
        settings: of the cluster, for the history.
        file: where the history is kept.
        progress: called whenever a fault is over.
    """
    history = History(file, time.monotonic)
    history.note("run", **asdict(weather), settings=settings)
    view = ClusterView(endpoint)
    load = Load(endpoint, model, make_requests(weather.seed), history, weather.seed)
    try:
        await load.learn()
        before = await view.census()
        load.begin(weather.streams)
        await _until_loaded(load, weather.streams)
        injector = Injector(view, load, history, crowd=CROWD * weather.streams)
        await strike_all(faults, injector, load, weather, progress)
        await load.finish()
        for what in await view.leaks(before):
            history.note("leak", what=what)
        history.note("counts", **injector.effects)
        history.note("over")
    finally:
        await view.close()
    return history.events


async def _until_loaded(load: Load, num_streams: int) -> None:
    deadline = time.monotonic() + LOAD_WITHIN_S
    while load.num_live < (num_streams + 1) // 2 and time.monotonic() < deadline:
        await asyncio.sleep(TICK_S)


async def strike_all(
    faults: Sequence[Fault],
    injector: Injector,
    load: Load,
    weather: Weather,
    progress: Callable[[], object],
) -> None:
    """All faults of the plan, in its order as far as their victims are there; ends when all are over."""
    waiting, running = list(faults), set[asyncio.Task[None]]()
    deadline = time.monotonic() + weather.seconds
    not_before = 0.0
    while waiting and time.monotonic() < deadline:
        for task in [task for task in running if task.done()]:
            running.remove(task)
            task.result()  # an error of ours ends the storm
            not_before = max(not_before, time.monotonic() + weather.rest_s)
            progress()
        await asyncio.sleep(TICK_S)
        if len(running) >= weather.at_once or time.monotonic() < not_before or not load.num_live:
            continue
        kinds = {fault.kind for fault in waiting}
        fault = next_possible(waiting, {kind: bool(injector.victims(kind)) for kind in kinds})
        if fault is not None:
            waiting.remove(fault)
            running.add(asyncio.create_task(injector.strike(fault)))
            await asyncio.sleep(0)  # it takes its victim now
            not_before = time.monotonic() + min(fault.gap_s, MAX_GAP_S)
    for task in running:
        await task
        progress()
