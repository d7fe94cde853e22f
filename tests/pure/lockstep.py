"""Curves and groups that the tests of cost and joint budgets share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actors.core.group_times import GroupTimes, SharedTime
from actors.core.sps import CostCurve

FREE = SharedTime.none()


def curve(tokens: npt.ArrayLike, times: npt.ArrayLike, draft_s: float = 0.0) -> CostCurve:
    return CostCurve(
        "here",
        np.asarray(tokens, np.float64),
        np.asarray(times, np.float64),
        np.array([1.0, 64.0]),
        np.array([draft_s, draft_s]),
        7,
        False,
    )


def group(
    curves: list[CostCurve], base_tokens: npt.ArrayLike, shared: SharedTime = FREE
) -> GroupTimes:
    n = len(curves)
    return GroupTimes(
        tuple(curves), np.ones(n), np.zeros(n), np.asarray(base_tokens, np.int64), shared
    )


def random_curve(rng: np.random.Generator, top: int) -> CostCurve:
    """A staircase with treads, cliffs and slopes."""
    num = int(rng.integers(2, 9))
    tokens = np.sort(rng.choice(np.arange(1, top), num, replace=False))
    return curve(
        tokens, 1 + np.cumsum(rng.choice([0, 0, 0.1, 0.5, 1.0], num) * rng.uniform(0.2, 1))
    )


def staircase(top: int, tread: int, base_s: float, step_s: float) -> CostCurve:
    """Level treads of `tread` tokens; each costs `step_s` more than the one before."""
    ends = np.arange(tread, top + 1, tread, dtype=np.float64)
    tokens = np.sort(np.concatenate([ends, ends[:-1] + 1]))
    levels = base_s + step_s * np.arange(len(ends))
    times = np.sort(np.concatenate([levels, levels[1:]]))
    return curve(tokens, times)
