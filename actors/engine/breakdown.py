"""Where the time of a decode step goes, part by part, on a CPU or in the stream of a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from actors.engine.target_engine import TorchTargetEngine
from actors.engine.target_model import StepInputs
from actors.engine.trial import prefilled

REPEATS, WARM_UPS = 12, 2


class Timer(Protocol):
    """Measures what a part costs the device."""

    def ms(self, action: Callable[[], object]) -> float:
        """Milliseconds of one run."""
        ...


class HostTimer:
    """For work that is done when the call returns."""

    def ms(self, action: Callable[[], object]) -> float:
        started = time.perf_counter()
        action()
        return (time.perf_counter() - started) * 1e3


class CudaTimer:
    """Events around a part in its stream: what the host does meanwhile, and how far it is ahead, does not count."""

    def ms(self, action: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def timer_for(device: torch.device) -> Timer:
    """The timer that is right for this device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


def breakdown_ms(
    engine: TorchTargetEngine, num_requests: int, context: int, timer: Timer | None = None
) -> dict[str, float]:
    """Milliseconds of one decode step after `context` tokens by part, each run alone, medians.

    `linears`, `head`, `attention` (rotation and K/V write included) and `norms` are timed by the device's timer,
    uncaptured; `step` is the whole step as served, by the clock, and `other` what the parts leave of it:
    Python, layout and acceptance. Parts that take longer alone than within a replayed step leave 0. Where K/V are kept
    from step to step (`kernels.row_mirror`), `step_gathered` is the whole step without that, in turns with one with it.
    """
    rows = prefilled(engine, num_requests, context, 1)
    own = rows.engine
    plan = rows.plan(dict.fromkeys(range(num_requests), 1))
    own.step(plan)  # what is kept from step to step is there
    timer = timer or timer_for(own.model.device)
    with torch.inference_mode():
        parts = _parts(own, own.inputs(plan) if own.paged is None else own.paged.inputs(plan))
        found = {name: _median(timer, part) for name, part in parts.items()}
    step = partial(own.step, plan)
    gathered: dict[str, float] = {}
    if own.mirrors:
        found["step"], gathered["step_gathered"] = _both_ms(own, step)
    else:
        found["step"] = _median(HostTimer(), step)
    found["other"] = max(0.0, 2 * found["step"] - sum(found.values()))
    found |= gathered
    return {name: round(ms, 2) for name, ms in found.items()}


def _parts(engine: TorchTargetEngine, inputs: StepInputs) -> dict[str, Callable[[], object]]:
    model, store = engine.model, engine.store
    x = model.embedding.index_select(0, inputs.token_ids)
    qkv = model.layers[0].qkv(x)
    factors = model.rotations(inputs)
    mixed = model.mix(qkv.clone(), 0, inputs, store, factors)

    def linears() -> None:
        for layer in model.layers:
            layer.qkv(x)
            layer.mlp.plus(x, layer.output.plus(mixed, x))

    def attention() -> None:
        for index in range(len(model.layers)):
            model.mix(qkv, index, inputs, store, factors)

    def norms() -> None:
        for layer in model.layers:
            layer.input_norm(x)
            layer.mlp_norm(x)

    return {
        "linears": linears,
        "head": partial(model.logits, x),
        "attention": attention,
        "norms": norms,
    }


def _both_ms(engine: TorchTargetEngine, step: Callable[[], object]) -> tuple[float, float]:
    """A step with what is kept of the one before, and one that gathers all K/V, in turns."""
    kept, timer = engine.mirrors, HostTimer()
    pairs = []
    for _ in range(REPEATS):
        step()  # it also brings what is kept up to date with the one that gathered
        with_it = timer.ms(step)
        engine.mirrors = {}
        pairs.append((with_it, timer.ms(step)))
        engine.mirrors = kept
    with_all, without = zip(*pairs, strict=True)
    return statistics.median(with_all), statistics.median(without)


def _median(timer: Timer, action: Callable[[], object]) -> float:
    return statistics.median([timer.ms(action) for _ in range(REPEATS + WARM_UPS)][WARM_UPS:])
