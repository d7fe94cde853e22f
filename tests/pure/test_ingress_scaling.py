"""What Serve is told of ingress replicas, and what our policy answers: without Serve."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from actors.core.ingress_scale import FrontLimits, FrontLoad
from cluster import ingress_scaling
from cluster.commands.remote import _describe
from cluster.ingress_scaling import IngressPolicy, loads_of, replica_options
from cluster.loop_meter import TICK_S, WINDOW_S, LoopMeter
from configs.ingress import IngressConfig

LIMITS = FrontLimits(least=1, most=3, target_lag_s=0.02, up_after_s=0.0, down_after_s=0.0)


def context(*loads: FrontLoad, wanted: int | None = None) -> Any:
    """As Serve makes one, of replicas called by their numbers."""
    metrics: dict[str, dict[int, float]] = {}
    for number, load in enumerate(loads):
        for name, value in asdict(load).items():
            metrics.setdefault(name, {})[number] = value
    return SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=len(loads),
        target_num_replicas=len(loads) if wanted is None else wanted,
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the supervisor hears."""
    decisions: list[dict[str, Any]] = []
    note = SimpleNamespace(remote=decisions.append)
    monkeypatch.setattr("ray.get_actor", lambda *_, **__: SimpleNamespace(note_ingress=note))
    monkeypatch.setattr(ingress_scaling, "LOOK_S", 0.0)
    return decisions


def test_the_policy_starts_and_ends_replicas_and_tells_the_supervisor_why(
    told: list[dict[str, Any]],
) -> None:
    policy = IngressPolicy(**asdict(LIMITS))
    assert policy(context(FrontLoad(0.9, 0.05, 40))) == (2, {})
    assert told[-1]["num_replicas"] == 2 and "a token waits 50.0 ms" in told[-1]["why"]
    idle = FrontLoad(0.02, 0.001, 2)
    assert policy(context(idle, idle))[0] == 1


def test_while_one_starts_or_ends_nothing_is_decided(told: list[dict[str, Any]]) -> None:
    policy = IngressPolicy(**asdict(LIMITS))
    assert policy(context(FrontLoad(0.9, 0.05, 40), wanted=2))[0] == 2
    half = context(FrontLoad(0.9, 0.05, 40))
    del half.aggregated_metrics["lag_s"][0]
    assert policy(half)[0] == 1 and loads_of(half.aggregated_metrics) == []


def test_it_looks_once_a_second_and_a_supervisor_that_is_gone_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise ValueError("no such actor")

    monkeypatch.setattr("ray.get_actor", gone)
    policy = IngressPolicy(**asdict(LIMITS))
    assert policy(context(FrontLoad(0.9, 0.05, 40)))[0] == 2
    assert policy(context(FrontLoad(0.1, 0.0, 0)))[0] == 2, "what was decided just now"


def test_off_unless_most_replicas_are_named() -> None:
    fixed = replica_options(IngressConfig(num_replicas=2))
    assert fixed == {"num_replicas": 2, "graceful_shutdown_timeout_s": ingress_scaling.STOP_S}
    with pytest.raises(ValidationError, match="max_replicas=2 lies below num_replicas=3"):
        IngressConfig(num_replicas=3, max_replicas=2)


def test_status_says_how_many_serve_and_why() -> None:
    report = {
        "deployed": True, "endpoint": "http://h/v1", "model": "m", "numerics": "fast", "nodes": [], "members": [],
        "autoscale": None, "ingress": {"num_replicas": 2, "why": "a token waits 30.0 ms in the front"},
    }  # fmt: skip
    assert "ingress   2 replicas: a token waits 30.0 ms" in _describe(report)


# --- what a replica measures ----------------------------------------------------------------------------------------


def test_a_meter_tells_of_the_last_seconds_only() -> None:
    meter = LoopMeter()
    assert meter.stats() == {"busy_share": 0.0, "lag_s": 0.0}
    looks = round(WINDOW_S / TICK_S)
    for look in range(looks):
        meter.note(look * TICK_S, 0.0, 1.0)
    assert meter.stats()["lag_s"] == 1.0
    for look in range(looks, 2 * looks):  # half of each tick it computes, and is on time
        meter.note(look * TICK_S, (look - looks) * TICK_S / 2, 0.0)
    assert meter.stats() == {"busy_share": pytest.approx(0.5), "lag_s": 0.0}


async def test_it_sees_a_loop_that_computes() -> None:
    meter = LoopMeter()
    measuring = asyncio.create_task(meter.run())

    async def until(condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                end = time.thread_time() + 0.3
                while time.thread_time() < end:
                    pass
                await asyncio.sleep(0)

    await until(lambda: meter.stats()["lag_s"] > 0.1 and meter.stats()["busy_share"] > 0)
    measuring.cancel()
