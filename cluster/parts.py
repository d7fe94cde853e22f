"""The exchangeable parts of a cluster: what computes, and what answers HTTP. Imports torch only inside the actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.drafter import DrafterEngineFactory
from actors.engine.base import DrafterEngine, TargetEngine
from actors.shell import Seat
from actors.target import MeasureSteps, StepTimes, TargetEngineFactory
from configs.schema import ClusterConfig


@dataclass(frozen=True)
class Parts:
    """Functions that are sent to the actors by name, so they must be importable there."""

    target_engine: TargetEngineFactory
    drafter_engine: DrafterEngineFactory
    measure_steps: MeasureSteps
    run_ingress: Callable[[ClusterConfig], str]
    stop_ingress: Callable[[], None]

    @classmethod
    def real(cls) -> Parts:
        from cluster.app import run_ingress, stop_ingress

        return cls(target_engine, drafter_engine, measure_steps, run_ingress, stop_ingress)


def target_engine(config: ClusterConfig, seat: Seat) -> TargetEngine:
    raise NotImplementedError


def drafter_engine(config: ClusterConfig, seat: Seat) -> DrafterEngine:
    raise NotImplementedError


def measure_steps(engine: TargetEngine, config: ClusterConfig) -> StepTimes:
    raise NotImplementedError
