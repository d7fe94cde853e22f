"""What steps cost on this machine: tokens per second without speculation, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from actors.engine.breakdown import breakdown_ms
from actors.engine.moe_bench import moe_stages_ms
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.engine.trial import prefilled
from configs.load import ConfigError
from configs.schema import ClusterConfig
from kernels import dispatch

BENCH_CONTEXT = 128
BENCH_STEPS, WARM_UPS = 32, 4

Progress = Callable[[str], None]


def run(
    config: ClusterConfig,
    batch_sizes: Sequence[int],
    progress: Progress,
    *,
    captures: bool = True,
    context: int = BENCH_CONTEXT,
) -> dict[str, object]:
    """Load the target of `config` and measure plain decoding at each batch size; JSON-able.

    `tokens_per_s` and `step_ms` are by batch size (medians, `context` growing); `breakdown_ms` says for the
    smallest and the largest where a step's time goes. Of a model with experts, `step_ms` also has the stages of a step
    (see `moe_stages_ms`) at `stages_batch`, the largest.

    Args:
        captures: replay steps from CUDA graphs where the device has them.
        context: tokens of each request before the first step.

    Raises CheckpointError when the target cannot be loaded, ConfigError where the model has no room for `context`.
    """
    most = config.model.max_model_len - BENCH_STEPS - WARM_UPS
    if not 1 <= context <= most:
        raise ConfigError(
            "--context",
            context,
            "the command line",
            f"model.max_model_len is {config.model.max_model_len} and {BENCH_STEPS + WARM_UPS} steps follow",
            f"use 1 to {most}",
        )
    if config.target.num_threads:
        torch.set_num_threads(config.target.num_threads)
    engine = load_engine(config, captures=captures)
    spec = engine.spec
    progress(f"{spec.name}: {spec.dtype}, {spec.numerics}, {torch.get_num_threads()} threads")
    step_ms: dict[str, float] = {}
    for size in batch_sizes:
        step_ms[str(size)] = decode_step_s(engine, size, context=context) * 1e3
        progress(f"batch {size}: {size / step_ms[str(size)] * 1e3:.1f} tokens/s")
    shown = {min(batch_sizes), max(batch_sizes)}
    parts = {size: breakdown_ms(engine, size, context) for size in shown}
    for size, ms in sorted(parts.items()):
        progress(f"batch {size}, ms: " + ", ".join(f"{name} {value}" for name, value in ms.items()))
    stages_ms: dict[str, float] = {}
    if engine.model.config.moe is not None:
        stages_ms = moe_stages_ms(engine, max(batch_sizes))
        progress("stages, ms: " + ", ".join(f"{name} {ms}" for name, ms in stages_ms.items()))
    return {
        "model": spec.name,
        "dtype": spec.dtype,
        "numerics": spec.numerics,
        "device": spec.device,
        "kernels": dispatch.describe(spec.device),
        "graphs": captures and engine.paged is not None,
        "num_threads": torch.get_num_threads(),
        "context_len": context,
        "tokens_per_s": {k: round(int(k) / ms * 1e3, 1) for k, ms in step_ms.items()},
        "step_ms": {k: round(ms, 2) for k, ms in step_ms.items()} | stages_ms,
        **({"stages_batch": max(batch_sizes)} if stages_ms else {}),
        "breakdown_ms": {str(size): ms for size, ms in sorted(parts.items())},
    }


def decode_step_s(
    engine: TorchTargetEngine,
    num_requests: int,
    steps: int = BENCH_STEPS,
    context: int = BENCH_CONTEXT,
) -> float:
    """Median seconds of a whole step of `num_requests` greedy requests, one token each, after `context` tokens."""
    rows = prefilled(engine, num_requests, context, steps + WARM_UPS)
    step = dict.fromkeys(range(num_requests), 1)
    plans = [rows.plan(step) for _ in range(steps + WARM_UPS)]
    return statistics.median([_timed(partial(rows.engine.step, plan)) for plan in plans][WARM_UPS:])


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    from actors.engine.bench_command import main

    raise SystemExit(main())
