"""What steps cost on this machine: tokens per second without speculation, where the time goes, the cost curve."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from actors.core.sampling import SamplingParams
from actors.engine.breakdown import breakdown_ms
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.engine.trial import GREEDY, TrialSequences, prefilled
from configs.schema import ClusterConfig
from kernels import dispatch

log = logging.getLogger(__name__)

BENCH_CONTEXT, PROFILE_CONTEXT = 128, 256
BENCH_STEPS = 32
PROFILE_REQUESTS, PROFILE_QUERIES = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6)
PROFILE_STEPS = 5
MIN_PROFILE_POINTS = 4
PROFILE_BUDGET_S = 15.0  # after it, the points still missing are left out
SAMPLED = SamplingParams(temperature=1.0, noise_key=1)

Progress = Callable[[str], None]
StepTimes = tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]
]  # batch tokens, requests, seconds; each [G]


def run(
    config: ClusterConfig,
    batch_sizes: Sequence[int],
    progress: Progress,
    *,
    captures: bool = True,
) -> dict[str, object]:
    """Load the target of `config` and measure plain decoding at each batch size; JSON-able.

    `tokens_per_s` and `step_ms` are by batch size (medians, context 128 and growing); `breakdown_ms` says for the
    smallest and the largest where a step's time goes.

    Args:
        captures: replay steps from CUDA graphs where the device has them.

    Raises CheckpointError when the target cannot be loaded.
    """
    if config.target.num_threads:
        torch.set_num_threads(config.target.num_threads)
    engine = load_engine(config, captures=captures)
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
        "device": spec.device,
        "kernels": dispatch.describe(spec.device),
        "graphs": captures and engine.paged is not None,
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


def profile_step_times(engine: TorchTargetEngine, config: ClusterConfig) -> StepTimes:
    """The cost curve of a rank: whole steps of verification rounds, half the requests greedy, half sampled.

    Every point is the median of `PROFILE_STEPS` steps after one that is not counted. The corners come first, so that
    a slow or busy machine, on which `PROFILE_BUDGET_S` does not suffice, gets a coarser curve, not a later start.
    """
    points = profile_points(config)
    widest = max(query_len for _, query_len in points)
    context = min(PROFILE_CONTEXT, engine.spec.max_model_len - widest)
    rows = prefilled(engine, max(r for r, _ in points), context, widest)
    deadline = time.perf_counter() + PROFILE_BUDGET_S
    found: list[tuple[int, int, float]] = []
    for num_requests, query_len in points:
        if len(found) >= MIN_PROFILE_POINTS and time.perf_counter() > deadline:
            log.warning(
                "step times: %d of %d points measured in %.0f s, the rest is interpolated",
                len(found),
                len(points),
                PROFILE_BUDGET_S,
            )
            break
        seconds = _round_s(rows, num_requests, query_len, config.drafter.draft_top_k)
        found.append((num_requests * query_len, num_requests, seconds))
    tokens, counts, times = zip(*sorted(found), strict=True)
    return np.array(tokens), np.array(counts), np.array(times)


def profile_points(config: ClusterConfig) -> list[tuple[int, int]]:
    """(requests, query_len) to measure, the corners first, then ever finer."""
    gamma = config.drafter.gamma if config.model.drafter else 0
    most = config.target.max_running
    requests = sorted({min(r, most) for r in PROFILE_REQUESTS} | {most})
    queries = sorted({min(q, 1 + gamma) for q in PROFILE_QUERIES} | {1 + gamma})
    grid = [
        (r, q) for r in requests for q in queries if r * q <= max(config.target.max_batch_tokens, r)
    ]
    order = {r: i for i, r in enumerate(_coarse_first(requests))}
    rank = {q: i for i, q in enumerate(_coarse_first(queries))}
    return sorted(grid, key=lambda point: max(order[point[0]], rank[point[1]]))


def _coarse_first(values: list[int]) -> list[int]:
    """Both ends, then what lies between, every second one first."""
    inner = values[1:-1]
    return list(dict.fromkeys([values[0], values[-1], *inner[1::2], *inner[::2]]))


def _round_s(rows: TrialSequences, num_requests: int, query_len: int, draft_top_k: int) -> float:
    start = rows.length.copy()
    plan = rows.plan(
        dict.fromkeys(range(num_requests), query_len),
        rounds=True,
        sampling=[(GREEDY, SAMPLED)[r % 2] for r in range(num_requests)],
        draft_top_k=draft_top_k,
    )
    rows.length = start
    times = [_timed(lambda: rows.engine.step(plan)) for _ in range(1 + PROFILE_STEPS)]
    return statistics.median(times[1:])


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    from actors.engine.bench_command import main

    raise SystemExit(main())
