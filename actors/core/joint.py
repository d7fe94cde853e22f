"""Joint budgets of a lockstep group: the draft tokens of every rank that maximise sum(tau_r) / T (contract C6).

All ranks of a group wait for the slowest, so T = max_r f_r(k_r) + g(sum k_r). Fix the level M of the maximum: rank r
may then take up to K_r(M) draft tokens for nothing but their share of g, and the best set of any size K is the K
largest survivals among the slots so opened. What remains is a search over the grid (level M, size K) in which every
point is a plan; f and g may be as jagged as they like.

The result depends on all survivals it was given, so it is lawful only for steps at least two later (C3). Ties go by
position, rank and row, never by a token's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.group_times import GroupTimes
from actors.core.prefix_scheduler import MIN_SURVIVAL, Budget
from actors.core.slot_ranking import BinnedSlots, ExactSlots, Slots

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

EXACT_SLOTS = 384  # up to so many slots every slot and level is tried; beyond, bins of survival and a refined grid
ROUNDING = 1e-6  # relative; a plan that is worse by less than this is as good
HYSTERESIS = 0.005  # relative gain a plan needs over the one in force
NUM_LEVELS = 40
COARSE = 8  # bins that are one bin while the levels are searched
NUM_REFINED = 12
SUBDIVISIONS = (
    4  # parts of a bin that are tried, so that many equal survivals need not move all at once
)


@dataclass(frozen=True)
class JointPlan:
    """One budget a rank, and what the plan expects of the step.

    `rule`: joint, uniform (a common length is predicted to be as good), none (nothing is worth verifying) or idle.
    """

    max_draft_tokens: Int64  # [n]
    min_survival: Float64  # [n]
    rule: str
    tokens: float  # expected committed tokens
    step_time_s: float

    @property
    def throughput(self) -> float:
        return self.tokens / self.step_time_s

    def budgets(self) -> list[Budget]:
        return [
            Budget(int(most), float(price), self.rule)
            for most, price in zip(self.max_draft_tokens, self.min_survival, strict=True)
        ]


def plan_group(
    worth: Float32,
    num_requests: Int64,
    times: GroupTimes,
    min_predicted_gain: float = 0.0,
    base_worth: float | None = None,
    incumbent: Int64 | None = None,
) -> JointPlan:
    """The plan for one group of n ranks.

    Args:
        worth: [sum R, gamma] in 0..1, what verifying each slot brings, rank after rank: survivals of at least two
            steps before the planned one, or survivals times the weight of their class.
        num_requests: [n] rows of each rank.
        times: the cost of the planned step.
        min_predicted_gain: relative gain over the best common length below which that length is used instead.
        base_worth: what the step brings without any draft token; None is a token a request.
        incumbent: [n] draft tokens of the plan in force. It stays unless another is better by `HYSTERESIS`, so that
            budgets do not run after the noise of a few survivals.
    """
    assert len(worth) == num_requests.sum() and len(num_requests) == len(times.curves)
    nothing = np.zeros(len(num_requests), np.int64)
    if not len(worth):
        return JointPlan(nothing, np.ones(len(nothing)), "idle", 0.0, times.step_time_s(nothing))
    base = float(len(worth)) if base_worth is None else base_worth
    slots: Slots
    if worth.size <= EXACT_SLOTS:
        slots = ExactSlots.of(worth, num_requests)
        drafts = _search_exact(slots, base, times)
    else:
        slots = BinnedSlots.of(worth, num_requests)
        drafts = _search_binned(slots, base, times)
    tokens, time = base + float(slots.expected(drafts).sum()), times.step_time_s(drafts)
    if incumbent is not None:
        kept = np.minimum(incumbent, slots.num)
        kept_tokens, kept_time = base + float(slots.expected(kept).sum()), times.step_time_s(kept)
        if tokens / time < (1.0 + HYSTERESIS) * kept_tokens / kept_time:
            drafts, tokens, time = kept, kept_tokens, kept_time
    length, uniform_rate = _best_uniform(worth, base, num_requests, times)
    if tokens / time < (1.0 + min_predicted_gain - ROUNDING) * uniform_rate:
        drafts = num_requests * length
        time = times.step_time_s(drafts)
        price = np.full(len(drafts), 0.0 if length else 1.0)
        rule = "uniform" if length else "none"
        return JointPlan(drafts, price, rule, uniform_rate * time, time)
    price = _prices(slots, times, drafts, tokens / time)
    return JointPlan(drafts, price, "joint" if drafts.any() else "none", tokens, time)


def _best_uniform(
    worth: Float32, base: float, num_requests: Int64, times: GroupTimes
) -> tuple[int, float]:
    """The best common verify length of the group and its throughput."""
    gamma = worth.shape[1]
    ones = np.ones(len(worth), np.float32)
    gained = np.concatenate([[0.0], np.cumsum((ones @ worth).astype(np.float64))])
    lengths = np.arange(gamma + 1)
    drafts = num_requests[:, None] * lengths
    time = times.rank_times_s(drafts).max(axis=0)
    time = time + times.shared(times.base_tokens.sum() + drafts.sum(axis=0))
    rate = (base + gained) / time
    return int(rate.argmax()), float(rate.max())


def _search_exact(slots: ExactSlots, base: float, times: GroupTimes) -> Int64:
    """Every level that some number of drafts reaches against every size of the pooled ranking."""
    widest = int(slots.num.max(initial=0))
    if not widest:
        return np.zeros(len(slots.num), np.int64)
    reach = np.arange(widest + 1)
    reached = times.rank_times_s(np.broadcast_to(reach, (len(slots.num), widest + 1)))
    levels = np.unique(reached[reach <= slots.num[:, None]])
    levels = levels[levels >= reached[:, 0].max()]
    caps = np.minimum(times.most_drafts(levels), slots.num[:, None])  # [n, G]
    is_open = slots.place[:, None] < caps[slots.rank]  # [N, G]
    sizes = _with_zero(np.cumsum(is_open, axis=0))
    gained = _with_zero(np.cumsum(is_open * slots.survival[:, None], axis=0))
    time = levels + times.shared(times.base_tokens.sum() + sizes)
    rate = (base + gained) / time
    size, level = np.unravel_index(int(rate.argmax()), rate.shape)
    taken = is_open[:size, level]
    return np.bincount(slots.rank[:size][taken], minlength=len(slots.num)).astype(np.int64)


def _with_zero(sums: npt.NDArray[np.generic]) -> Float64:
    """Running sums with the empty sum in front: [N, G] to [N + 1, G]."""
    return np.concatenate([np.zeros((1, sums.shape[1])), sums])


def _search_binned(slots: BinnedSlots, base: float, times: GroupTimes) -> Int64:
    """A grid of levels, then a finer one around its best, against bins of survival."""
    nothing, everything = np.zeros(len(slots.num)), slots.num.astype(np.float64)
    low = float(times.rank_times_s(nothing).max())
    high = float(times.rank_times_s(everything).max())
    levels = _level_grid(slots, times, low, max(high, low))
    best, _ = _best_point(slots.merged(COARSE), base, times, levels)
    near = levels[max(best - 1, 0)], levels[min(best + 1, len(levels) - 1)]
    finer = np.unique(np.append(np.geomspace(*near, NUM_REFINED), levels[best]))
    _, plan = _best_point(slots, base, times, finer)
    return plan


def _level_grid(slots: BinnedSlots, times: GroupTimes, low: float, high: float) -> Float64:
    """Levels between `low` and `high`: evenly in the logarithm, and the tops of the treads of the fullest ranks."""
    even = np.geomspace(low, high, NUM_LEVELS)
    busiest = np.argsort(-(times.base_tokens + slots.num), kind="stable")[:2]
    tops = [
        times.curves[rank].step_time_s * times.scale[rank] + times.offset_s[rank]
        for rank in busiest
    ]
    treads = np.unique(np.concatenate(tops))
    treads = treads[(treads >= low) & (treads <= high)]
    thinned = treads[:: max(1, -(-len(treads) // NUM_LEVELS))]
    return np.unique(np.concatenate([even, thinned]))


def _best_point(
    slots: BinnedSlots, base: float, times: GroupTimes, levels: Float64
) -> tuple[int, Int64]:
    """The best level (its index) and the drafts of each rank there."""
    caps = np.clip(times.most_drafts(levels), 0, slots.num[:, None])  # [n, G]
    counts = slots.cumulative.astype(np.float32)
    ones = np.ones(len(counts), np.float32)
    open_slots = np.empty((len(levels), counts.shape[1]), np.float32)
    # One array for all levels: fresh memory costs more than what is computed in it.
    opened = np.empty_like(counts)
    for at, cap in enumerate(caps.T.astype(np.float32)):
        np.dot(ones, np.minimum(counts, cap[:, None], out=opened), out=open_slots[at])
    per_bin = np.diff(open_slots.astype(np.float64), axis=1, prepend=0.0)  # [G, bins]
    # A cut in a bin takes 0, 1/4, 2/4 or 3/4 of it; the cut after the last bin takes everything.
    part = np.arange(SUBDIVISIONS) / SUBDIVISIONS
    sizes = _cuts(per_bin, part)  # [G, bins * 4 + 1]
    gained = _cuts(per_bin * slots.centres, part)
    time = levels[:, None] + times.shared(times.base_tokens.sum() + sizes)
    rate = (base + gained) / time
    level, cut = (int(at) for at in np.unravel_index(int(rate.argmax()), rate.shape))
    whole, piece = divmod(cut, SUBDIVISIONS)
    edges = np.concatenate([np.zeros((len(counts), 1), np.int64), slots.cumulative], axis=1)
    drafts = edges[:, whole]
    if piece:
        drafts = drafts + ((edges[:, whole + 1] - drafts) * part[piece]).astype(np.int64)
    return level, np.minimum(drafts, caps[:, level])


def _cuts(per_bin: Float64, part: Float64) -> Float64:
    """Running sums up to every part of every bin, and up to the end: [G, bins] to [G, bins * parts + 1]."""
    before = np.cumsum(per_bin, axis=1) - per_bin
    inside = before[..., None] + per_bin[..., None] * part
    return np.concatenate(
        [inside.reshape(len(per_bin), -1), per_bin.sum(axis=1, keepdims=True)], axis=1
    )


def _prices(slots: Slots, times: GroupTimes, drafts: Int64, rate: float) -> Float64:
    """What a draft token of each rank must bring to pay for its time at the optimum, [n].

    A token costs the group its share of g, and on the slowest ranks the level itself; those share its price, since
    trimming one alone saves nothing. Never above the last slot the plan admits.
    """
    window = np.maximum(drafts // 8, 1)
    fewer = np.maximum(drafts - window, 0)
    own = times.rank_times_s(drafts)
    slowest = own >= own.max() * (1 - 1e-9)
    level = np.where(slowest, (own - times.rank_times_s(fewer)) / window / slowest.sum(), 0.0)
    total = int(times.base_tokens.sum() + drafts.sum())
    step = max(int(drafts.sum()) // 8, 1)
    shared = float(times.shared(total) - times.shared(total - step)) / step
    price = np.clip(rate * (level + shared), MIN_SURVIVAL, slots.last_admitted(drafts))
    return np.where(drafts > 0, price, 1.0)
