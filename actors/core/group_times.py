"""The shape of a lockstep group's step time, T = max_r f_r + g: its two parts, and one coming step (contract C6).

`cost.LockstepModel` fills it with what it has learned; `joint` searches over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from actors.core.sps import CostCurve

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_ROUNDING = 1e-12


@dataclass(frozen=True)
class SharedTime:
    """g: seconds over all tokens of the group; straight between knots, level before the first, never falling."""

    tokens: Float64  # [K] strictly ascending
    seconds: Float64  # [K] never decreasing

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.seconds) > 0
        assert (np.diff(self.tokens) > 0).all() and (np.diff(self.seconds) >= 0).all()

    @classmethod
    def none(cls) -> SharedTime:
        return cls(np.zeros(1), np.zeros(1))

    def __call__(self, total_tokens: npt.ArrayLike) -> Float64:
        total = np.asarray(total_tokens, np.float64)
        inside: Float64 = np.interp(total, self.tokens, self.seconds)
        if len(self.tokens) == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond: Float64 = np.maximum(total - self.tokens[-1], 0.0) * slope
        return inside + beyond


@dataclass(frozen=True)
class GroupTimes:
    """T of one coming step as a function of the draft tokens of each rank; all else about the step is fixed."""

    curves: tuple[CostCurve, ...]  # [n]; ranks of one kind share the object
    scale: Float64  # [n] factor on the curve
    offset_s: Float64  # [n] drafting and context
    base_tokens: (
        Int64  # [n] requests and prefill tokens: what is in the step before any draft token
    )
    shared: SharedTime = field(default_factory=SharedTime.none)

    def rank_times_s(self, drafts: npt.ArrayLike) -> Float64:
        """f_r of every rank. drafts: [n] or [n, X], the same shape comes back."""
        drafts = np.asarray(drafts, np.float64)
        extra = (1,) * (drafts.ndim - 1)
        tokens = drafts + self.base_tokens.reshape(-1, *extra)
        times = np.empty(drafts.shape)
        for curve, rows in kinds_of(self.curves):
            times[rows] = curve.verify_time_s(tokens[rows])
        return times * self.scale.reshape(-1, *extra) + self.offset_s.reshape(-1, *extra)

    def most_drafts(self, levels_s: Float64) -> Int64:
        """The most draft tokens each rank can take without f_r passing a level: [n, G], -1 where none fits at all."""
        room = (levels_s * (1 + _ROUNDING) - self.offset_s[:, None]) / self.scale[:, None]
        most = np.empty(room.shape)
        for curve, rows in kinds_of(self.curves):
            most[rows] = _most_tokens(curve, room[rows])
        drafts = np.clip(np.floor(most + 1e-9) - self.base_tokens[:, None], -1, 2**31)
        return drafts.astype(np.int64)

    def step_time_s(self, drafts: npt.ArrayLike) -> float:
        """T when the ranks verify these many draft tokens [n]."""
        drafts = np.asarray(drafts)
        total = int(self.base_tokens.sum() + drafts.sum())
        return float(self.rank_times_s(drafts).max() + self.shared(total))


def kinds_of(curves: tuple[CostCurve, ...]) -> list[tuple[CostCurve, npt.NDArray[np.intp]]]:
    """Each different curve with the ranks that share it."""
    first = curves[0]
    if all(curve is first for curve in curves):
        return [(first, np.arange(len(curves)))]
    kinds: dict[int, tuple[CostCurve, list[int]]] = {}
    for row, curve in enumerate(curves):
        kinds.setdefault(id(curve), (curve, []))[1].append(row)
    return [(curve, np.array(rows)) for curve, rows in kinds.values()]


def _most_tokens(curve: CostCurve, level_s: Float64) -> Float64:
    """The largest number of tokens (not an integer) whose verify time does not pass a level; -inf when none does."""
    tokens, times = curve.batch_tokens, curve.step_time_s
    at = np.searchsorted(times, level_s, side="right")  # knots within the level
    low = np.maximum(at - 1, 0)
    high = np.minimum(at, len(tokens) - 1)
    rise = times[high] - times[low]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = tokens[low] + (tokens[high] - tokens[low]) * (level_s - times[low]) / rise
        beyond = tokens[-1] + (level_s - times[-1]) / curve.tail_slope
    most = np.where(at == len(tokens), beyond, inside)
    return np.where(at == 0, -np.inf, np.where(np.isnan(most), np.inf, most))


def drafting_s(curve: CostCurve, num_requests: npt.ArrayLike) -> Float64:
    """Seconds of drafting for these many requests, any shape; nothing for none."""
    requests = np.asarray(num_requests, np.float64)
    seconds = np.interp(requests, curve.draft_requests, curve.draft_time_s)
    return seconds * np.where(
        requests > 0, np.maximum(requests / curve.draft_requests[-1], 1.0), 0.0
    )


def shared_of(curves: Sequence[CostCurve]) -> SharedTime:
    """g of a group whose ranks were measured at once, all loaded alike: what a step took beyond the slowest's own part.

    Every curve must tell its own part.
    """
    tokens = curves[0].batch_tokens
    parts = [curve.own for curve in curves]
    own = np.max([part.verify_time_s(tokens) for part in parts if part is not None], axis=0)
    whole = np.median([curve.verify_time_s(tokens) for curve in curves], axis=0)
    return SharedTime(tokens * len(curves), np.maximum.accumulate(np.maximum(whole - own, 0.0)))


def split_profiles(
    alone: CostCurve, together: CostCurve, num_ranks: int
) -> tuple[CostCurve, SharedTime]:
    """f and g from two measurements of one group: one rank loaded and the others empty; all ranks loaded alike.

    alone(B) = f(B) + g(B) and together(B) = f(B) + g(nB), so g(nB) = g(B) + together(B) - alone(B): g is built up from
    small B in steps of a factor n. A constant in g cannot be seen and stays in f, where it does no harm.

    Returns:
        The curve of f, and g.
    """
    if num_ranks == 1:
        return alone, SharedTime.none()
    tokens, seconds = [0.0, 1.0], [0.0, 0.0]
    while tokens[-1] < together.batch_tokens[-1]:
        at = tokens[-1]
        more = float(together.verify_time_s(at) - alone.verify_time_s(at))
        tokens.append(at * num_ranks)
        seconds.append(seconds[-1] + max(more, 0.0))
    shared = SharedTime(np.array(tokens), np.array(seconds))
    own = np.maximum.accumulate(
        np.maximum(alone.step_time_s - shared(alone.batch_tokens), _ROUNDING)
    )
    return replace(alone, step_time_s=own), shared
