"""Measure what complete verification steps cost: over tokens, requests and context (paper section 5.2, contract C6).

Half the requests are greedy, half sampled; tokens are random, so a mixture of experts routes them as it would. Repeats
go round the points in turn: a machine that is slow for a while makes every point noisy instead of some points dear.

Ranks of a group measure at once, all loaded alike: every step is one of the group, and each rank's clock tells what of
it was its own work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from actors.core.layout import StepPlan
from actors.core.sampling import SamplingParams
from actors.core.step_samples import StepSamples
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.trial import GREEDY, prefilled
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

CURVE_CONTEXT = 256
OTHER_CONTEXTS = (32, 1024)
REQUESTS, QUERIES = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6)
QUICK_REPEATS = 5
QUICK_BUDGET_S = 15.0  # after it, a start leaves the points still missing out
MIN_POINTS = 4
SAMPLED = SamplingParams(temperature=1.0, noise_key=1)

Advance = Callable[[], None]
Timed = tuple[float, float | None]  # seconds of a step, and of it what a group did together


@dataclass(frozen=True)
class Point:
    """One kind of step."""

    num_requests: int
    query_len: int
    context_len: int

    @property
    def batch_tokens(self) -> int:
        return self.num_requests * self.query_len


def quick_samples(engine: TorchTargetEngine, config: ClusterConfig) -> StepSamples:
    """The cost curve for a rank that starts: one context, and no longer than `QUICK_BUDGET_S`.

    The corners come first, so that a slow or busy machine gets a coarser curve, not a later start.
    """
    points = curve_points(config)
    steps = _Steps(engine, config, points)
    deadline = time.perf_counter() + QUICK_BUDGET_S
    times: list[list[Timed]] = []
    for point in points:
        if len(times) >= MIN_POINTS and not _all_say(engine, time.perf_counter() <= deadline):
            log.warning(
                "step times: %d of %d points measured in %.0f s, the rest is interpolated",
                *(len(times), len(points), QUICK_BUDGET_S),
            )
            break
        steps.warm_up(point)
        times.append([steps.time_s(point) for _ in range(QUICK_REPEATS)])
    return _samples(points[: len(times)], times, points[0].context_len)


def full_samples(
    engine: TorchTargetEngine, config: ClusterConfig, repeats: int, advance: Advance
) -> StepSamples:
    """The whole grid, at several contexts; `advance` is called `num_measurements` times."""
    points = full_points(config)
    steps = _Steps(engine, config, points)
    for point in points:
        steps.warm_up(point)
        advance()
    times: list[list[Timed]] = [[] for _ in points]
    for _ in range(repeats):
        for of_point, point in zip(times, points, strict=True):
            of_point.append(steps.time_s(point))
            advance()
    return _samples(points, times, points[0].context_len)


def num_measurements(config: ClusterConfig, repeats: int) -> int:
    return len(full_points(config)) * (1 + repeats)


def curve_points(config: ClusterConfig) -> list[Point]:
    """Steps at the curve's context, the corners first, then ever finer."""
    requests, queries = _axes(config)
    context = min(CURVE_CONTEXT, _longest_context(config))
    grid = [
        Point(r, q, context)
        for r in requests
        for q in queries
        if r * q <= max(config.target.max_batch_tokens, r)
    ]
    order = {r: i for i, r in enumerate(_coarse_first(requests))}
    rank = {q: i for i, q in enumerate(_coarse_first(queries))}
    return sorted(grid, key=lambda point: max(order[point.num_requests], rank[point.query_len]))


def full_points(config: ClusterConfig) -> list[Point]:
    """The curve's points, then those that tell what context costs: other contexts, shortest and longest rows."""
    points = curve_points(config)
    _, queries = _axes(config)
    ends = (queries[0], queries[-1])
    longest = _longest_context(config)
    contexts = {min(context, longest) for context in OTHER_CONTEXTS} - {points[0].context_len}
    return points + [
        Point(point.num_requests, point.query_len, context)
        for context in sorted(contexts)
        for point in points
        if point.query_len in ends
    ]


class _Steps:
    """Plans of all points over one cache, which holds the longest context of every row."""

    def __init__(
        self, engine: TorchTargetEngine, config: ClusterConfig, points: Sequence[Point]
    ) -> None:
        context = max(point.context_len for point in points)
        self._rows = prefilled(
            engine,
            max(point.num_requests for point in points),
            context,
            max(point.query_len for point in points),
        )
        self._draft_top_k = config.drafter.draft_top_k
        self._plans = {point: self._plan(point) for point in points}

    def _plan(self, point: Point) -> StepPlan:
        rows = self._rows
        rows.length[:] = point.context_len
        return rows.plan(
            dict.fromkeys(range(point.num_requests), point.query_len),
            rounds=True,
            sampling=[(GREEDY, SAMPLED)[r % 2] for r in range(point.num_requests)],
            draft_top_k=self._draft_top_k,
        )

    def warm_up(self, point: Point) -> None:
        self._rows.engine.step(self._plans[point])

    def time_s(self, point: Point) -> Timed:
        started = time.perf_counter()
        result = self._rows.engine.step(self._plans[point])
        return time.perf_counter() - started, result.shared_time_s


def _all_say(engine: TorchTargetEngine, own: bool) -> bool:
    """Whether all ranks of the engine's group say so: a step that one of them leaves out, all leave out."""
    return own if engine.model.sharding is None else engine.group.all_say(own)


def _samples(
    points: Sequence[Point], times: Sequence[Sequence[Timed]], curve_context_len: int
) -> StepSamples:
    shared = [[part for _, part in of_point if part is not None] for of_point in times]
    return StepSamples(
        np.array([point.batch_tokens for point in points], np.int64),
        np.array([point.num_requests for point in points], np.int64),
        np.array([point.context_len for point in points], np.int64),
        np.array([[whole for whole, _ in of_point] for of_point in times]),
        curve_context_len,
        np.array(shared) if shared and shared[0] else None,
    )


def _axes(config: ClusterConfig) -> tuple[list[int], list[int]]:
    """Numbers of requests and row lengths, ascending; both end with the most a rank can be asked for."""
    gamma = config.drafter.gamma if config.model.drafter else 0
    most = config.target.max_running
    requests = sorted({min(r, most) for r in REQUESTS} | {most})
    queries = sorted({min(q, 1 + gamma) for q in QUERIES} | {1 + gamma})
    return requests, queries


def _longest_context(config: ClusterConfig) -> int:
    """With all rows running, and a whole block behind the context: what the model and the cache allow."""
    target = config.target
    _, queries = _axes(config)
    fits = target.kv_cache_tokens // target.max_running
    return max(1, min(config.model.max_model_len, fits) - queries[-1])


def _coarse_first(values: list[int]) -> list[int]:
    """Both ends, then what lies between, every second one first."""
    inner = values[1:-1]
    return list(dict.fromkeys([values[0], values[-1], *inner[1::2], *inner[::2]]))
