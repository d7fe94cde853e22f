"""Where the time of a step of a model with experts goes, stage by stage, in steps as they are served."""

from __future__ import annotations

import time

import torch

from actors.core.layout import StepPlan
from actors.engine.experts import MoeLayer
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import prefilled
from kernels.rejection import verify, verify_batch

STAGES = ("attention", "dispatch", "experts", "combine", "sampling", "other")
MEASURED_STEPS, WARM_UP_STEPS = 12, 2
CONTEXT = 128


def moe_stages_ms(engine: TorchTargetEngine, num_requests: int) -> dict[str, float]:
    """Milliseconds of each of `STAGES` in a decode step of `num_requests`; together they are the step.

    Of the measured steps it is the one of median length.

    attention: norms, projections, attention, and feed-forwards without experts; dispatch: routing, sorting and, in a
    group, what travels to the experts; combine: what travels back, and the weighted sum; sampling: output head and
    acceptance; other: laying out the step.
    """
    num_steps = MEASURED_STEPS + WARM_UP_STEPS
    rows = prefilled(engine, num_requests, CONTEXT, num_steps)
    clock = _Clock(engine.model.device.type == "cuda")
    layers = [layer.mlp for layer in engine.model.layers if isinstance(layer.mlp, MoeLayer)]
    kept = [layer.trace for layer in layers]
    found: list[dict[str, float]] = []
    try:
        for layer in layers:
            layer.trace = clock.lap
        for _ in range(num_steps):
            plan = rows.plan(dict.fromkeys(range(num_requests), 1))
            clock.start()
            _step(rows.engine, plan, clock)
            found.append(dict(clock.seconds))
    finally:
        for layer, trace in zip(layers, kept, strict=True):
            layer.trace = trace
    measured = sorted(found[WARM_UP_STEPS:], key=lambda step: sum(step.values()))
    typical = measured[len(measured) // 2]
    return {stage: round(typical[stage] * 1e3, 3) for stage in STAGES}


@torch.inference_mode()
def _step(engine: TorchTargetEngine, plan: StepPlan, clock: _Clock) -> None:
    """`TorchTargetEngine.step`, with the clock read between its parts."""
    inputs = engine.inputs(plan) if engine.paged is None else engine.paged.inputs(plan)
    clock.lap("other")
    hidden, _ = engine.model.forward(inputs, engine.store)
    decided = verify_batch(plan, engine.model.device)
    verify(engine.model.logits(hidden.index_select(0, decided.token_rows)), decided)
    clock.lap("sampling")


class _Clock:
    """Seconds by stage since `start`."""

    def __init__(self, waits_for_device: bool) -> None:
        self._waits_for_device = waits_for_device
        self.start()

    def start(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self._waits_for_device:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now
