"""What steps cost on this machine: tokens per second without speculation, and where the time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from actors.engine.step_profile import prefilled
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from kernels.ragged_attention import AttentionLayout, attend

BENCH_CONTEXT = 128
BENCH_STEPS = 32

Progress = Callable[[str], None]


def run(config: ClusterConfig, batch_sizes: Sequence[int], progress: Progress) -> dict[str, object]:
    """Load the target of `config` and measure plain decoding at each batch size; JSON-able.

    `tokens_per_s` and `step_ms` are by batch size (medians, context 128 and growing); `breakdown_ms` says for the
    smallest and the largest where a step's time goes. Raises CheckpointError when the target cannot be loaded.
    """
    if config.target.num_threads:
        torch.set_num_threads(config.target.num_threads)
    engine = load_engine(config)
    spec = engine.spec
    progress(f"{spec.name}: {spec.dtype}, {spec.numerics}, {torch.get_num_threads()} threads")
    step_ms: dict[str, float] = {}
    for size in batch_sizes:
        step_ms[str(size)] = decode_step_s(engine, size) * 1e3
        progress(f"batch {size}: {size / step_ms[str(size)] * 1e3:.1f} tokens/s")
    parts = {size: breakdown_ms(engine, size) for size in {min(batch_sizes), max(batch_sizes)}}
    for size, ms in sorted(parts.items()):
        progress(f"batch {size}, ms: " + ", ".join(f"{name} {value}" for name, value in ms.items()))
    return {
        "model": spec.name,
        "dtype": spec.dtype,
        "numerics": spec.numerics,
        "num_threads": torch.get_num_threads(),
        "context_len": BENCH_CONTEXT,
        "tokens_per_s": {k: round(int(k) / ms * 1e3, 1) for k, ms in step_ms.items()},
        "step_ms": {k: round(ms, 2) for k, ms in step_ms.items()},
        "breakdown_ms": {str(size): ms for size, ms in sorted(parts.items())},
    }


def decode_step_s(engine: TorchTargetEngine, num_requests: int, steps: int = BENCH_STEPS) -> float:
    """Median seconds of a whole step of `num_requests` greedy requests, one token each."""
    rows = prefilled(engine, num_requests, BENCH_CONTEXT, steps + 4)
    step = dict.fromkeys(range(num_requests), 1)
    plans = [rows.plan(step) for _ in range(steps + 4)]
    return statistics.median([_timed(partial(rows.engine.step, plan)) for plan in plans][4:])


def breakdown_ms(engine: TorchTargetEngine, num_requests: int) -> dict[str, float]:
    """Milliseconds of one decode step by part, each measured alone; `other` is Python, layout and acceptance."""
    rows = prefilled(engine, num_requests, BENCH_CONTEXT, 1)
    plan = rows.plan(dict.fromkeys(range(num_requests), 1))
    model, store = engine.model, rows.engine.store
    with torch.inference_mode():
        inputs = rows.engine.inputs(plan)
        x = model.embedding.index_select(0, inputs.token_ids)
        qkv = model.layers[0].qkv(x)
        width, dim = model.config.num_heads * model.config.head_dim, model.config.head_dim
        queries = qkv[:, :width].view(len(x), -1, dim)
        keys_values = qkv[:, width:].view(len(x), -1, dim)
        mixed = queries.reshape(len(x), -1)
        layout = inputs.attention
        assert isinstance(layout, AttentionLayout)

        def linears() -> None:
            for layer in model.layers:
                layer.qkv(x)
                layer.mlp.plus(x, layer.output.plus(mixed, x))

        def attention() -> None:
            for index in range(len(model.layers)):
                store.write(index, inputs.slots, keys_values)
                attend(queries, store, index, layout)

        def norms() -> None:
            for layer in model.layers:
                layer.input_norm(x)
                layer.mlp_norm(x)

        parts = {
            "linears": linears,
            "head": lambda: model.logits(x),
            "attention": attention,
            "norms": norms,
            "step": lambda: rows.engine.step(plan),
        }
        found = {name: _median_ms(part) for name, part in parts.items()}
    found["other"] = max(0.0, 2 * found["step"] - sum(found.values()))
    return {name: round(ms, 2) for name, ms in found.items()}


def _median_ms(action: Callable[[], object], repeats: int = 12) -> float:
    return statistics.median([_timed(action) for _ in range(repeats + 2)][2:]) * 1e3


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
