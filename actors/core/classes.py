"""Tenants and classes of service: weights, deadlines, shortest and longest lengths, across all groups of a cluster.

The program: maximise sum_c w_c x_c^(1-f) / (1-f) over the draft tokens of every rank, where x_c is the tokens a
second that a request of class c gets and f the fairness, so that x_c >= 1 / deadline_c. For given step times it is
concave in the admitted slots, so a price solves it: each class has a weight, a slot is worth survival times weight,
and every group plans for worth on its own (`joint.plan_group`). The weights are w_c x_c^-f and, where a deadline
binds, its multiplier, found by dual ascent. Capacity that a class has no use for goes to the others by itself, since
only worth decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from actors.core.group_times import GroupTimes
from actors.core.joint import JointPlan, plan_group
from actors.core.service_class import ServiceClass, allocate_classes, worth_of

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MAX_BOOST = 16.0  # of a deadline's multiplier
BOOST_STEP = 0.15  # how far the log of a multiplier follows the log of the gap, a served step
MAX_MOVE = 0.06
TRIAL_LOG = 2.0  # after the log of a multiplier has risen by this much, it must have helped: not sooner, for slots
# come into play one level of the step time at a time
MIN_ELASTICITY = 0.1  # log of speed gained over log of multiplier; less starves others for nothing
HOLD_STEPS = 1000  # before a multiplier that did not help may rise again
DEADLINE_TOLERANCE = 0.002  # relative
SMOOTHING = 0.9  # of the served speeds


class ClassPrices:
    """The weight of each class, moved by how fast its requests are served. One for the whole cluster.

    Attributes:
        speed: [C] tokens a second of one request, smoothed; nan for a class that was not served yet.
    """

    def __init__(self, classes: Sequence[ServiceClass], fairness: float = 0.0) -> None:
        """`fairness`: 0 is throughput; 1 proportional fairness (a request at half the speed counts twice)."""
        assert classes and fairness >= 0
        self.classes = tuple(classes)
        self.fairness = fairness
        self.speed = np.full(len(classes), np.nan)
        self._boost = np.ones(len(classes))
        # Multiplier and speed at the start of the present trial, and the steps a failed one still holds.
        self._trial_boost, self._trial_speed = np.ones(len(classes)), np.full(len(classes), np.nan)
        self._hold = np.zeros(len(classes), np.int64)

    @property
    def unmet(self) -> tuple[str, ...]:
        """Classes whose deadline is missed though their multiplier is at its bound, or rose without helping."""
        late = self.lateness_log() > DEADLINE_TOLERANCE
        at_bound = (self._boost >= MAX_BOOST) | (self._hold > 0)
        return tuple(
            c.name for c, missed in zip(self.classes, late & at_bound, strict=True) if missed
        )

    def weights(self) -> Float64:
        """[C], the largest is 1."""
        weights = np.array([c.weight for c in self.classes]) * self._boost
        served = np.isfinite(self.speed) & (self.speed > 0)
        if self.fairness and served.any():
            typical = float(np.exp(np.log(self.speed[served]).mean()))
            relative = np.where(served, self.speed / typical, 1.0)
            weights = weights * np.power(relative, -self.fairness)
        normalised: Float64 = weights / float(weights.max())
        return normalised

    def observe(self, num_rounds: Int64, committed: Float64, seconds: float) -> None:
        """Fold in one step: rounds and committed tokens of each class [C], and how long it lasted."""
        served = num_rounds > 0
        now = committed[served] / (num_rounds[served] * seconds)
        before = np.where(np.isnan(self.speed[served]), now, self.speed[served])
        self.speed[served] = SMOOTHING * before + (1 - SMOOTHING) * now
        new = np.isnan(self._trial_speed)
        self._trial_speed[new] = self.speed[new]
        move = np.clip(BOOST_STEP * self.lateness_log(), -MAX_MOVE, MAX_MOVE)
        self.move(np.where(self._hold > 0, np.minimum(move, 0.0), move))
        self._hold = np.maximum(self._hold - 1, 0)
        self._judge_trials()

    def _judge_trials(self) -> None:
        """Take back multipliers that rose without making their class faster: the deadline is out of reach."""
        fresh = self._boost <= self._trial_boost
        risen = np.log(self._boost / self._trial_boost)
        gained = np.log(self.speed / self._trial_speed)  # nan for a class that was never served
        over = ~fresh & (risen >= TRIAL_LOG)
        futile = over & (gained < MIN_ELASTICITY * risen)
        self._boost[futile] = self._trial_boost[futile]
        self._hold[futile] = HOLD_STEPS
        renew = fresh | over
        self._trial_boost[renew] = self._boost[renew]
        self._trial_speed[renew] = self.speed[renew]

    def move(self, log_boost: Float64) -> None:
        """Raise the multipliers by these logs [C], within their bounds."""
        self._boost = np.clip(self._boost * np.exp(log_boost), 1.0, MAX_BOOST)

    def lateness_log(self) -> Float64:
        """log(seconds a token / deadline) of each class; 0 where there is no deadline or no speed yet."""
        deadline = np.array([c.max_tpot_s or np.nan for c in self.classes])
        late: Float64 = np.nan_to_num(-np.log(np.maximum(self.speed, 1e-12) * deadline), nan=0.0)
        return late


def plan_classes(
    survivals: Float32,
    class_ids: Int64,
    num_requests: Int64,
    times: GroupTimes,
    prices: ClassPrices,
    min_predicted_gain: float = 0.0,
    incumbent: Int64 | None = None,
) -> JointPlan:
    """The plan of one group for what its slots are worth. K counts forced slots; lambda is a worth.

    Args:
        survivals: [sum R, gamma] rank after rank.
        class_ids: [sum R] index of each row's class.
    """
    of_class = prices.weights()
    worth, forced = worth_of(survivals, class_ids, prices.classes, of_class.tolist())
    weights = of_class[class_ids]
    position = np.arange(survivals.shape[1])
    is_forced = position < forced[:, None]
    base = float(weights.sum() + (worth * is_forced).sum(dtype=np.float64))
    rank = np.repeat(np.arange(len(num_requests)), num_requests)
    forced_of_rank = np.bincount(rank, weights=forced, minlength=len(num_requests)).astype(np.int64)
    planned = plan_group(
        np.where(is_forced, np.float32(0.0), worth),
        num_requests,
        replace(times, base_tokens=times.base_tokens + forced_of_rank),
        min_predicted_gain,
        base,
        None if incumbent is None else np.maximum(incumbent - forced_of_rank, 0),
    )
    return replace(planned, max_draft_tokens=planned.max_draft_tokens + forced_of_rank)


def solve(
    groups: Sequence[tuple[Float32, Int64, Int64, GroupTimes]],
    prices: ClassPrices,
    iterations: int = 40,
) -> list[JointPlan]:
    """Plans of all groups with weights that fit each other: deadlines met where that is possible.

    Args:
        groups: (survivals, class_ids, num_requests, times) of each group.
    """
    plans: list[JointPlan] = []
    step, direction = np.full(len(prices.classes), 0.2), np.zeros(len(prices.classes))
    for _ in range(iterations):
        plans = [plan_classes(*group, prices) for group in groups]
        prices.speed = _predicted_speed(groups, plans, prices)
        late = prices.lateness_log()
        towards = np.where(np.abs(late) > DEADLINE_TOLERANCE, np.sign(late), 0.0)
        # A step grows while it leads the same way and is halved when it has led too far.
        step *= np.where(towards * direction < 0, 0.5, 1.3)
        before = prices.weights()
        prices.move(towards * np.minimum(step, 0.7))
        direction = np.where(towards != 0, towards, direction)
        if np.allclose(before, prices.weights(), rtol=1e-3):
            break
    return plans


def _predicted_speed(
    groups: Sequence[tuple[Float32, Int64, Int64, GroupTimes]],
    plans: list[JointPlan],
    prices: ClassPrices,
) -> Float64:
    """Tokens a second of one request of each class under these plans; nan where a class has none."""
    rate, requests = np.zeros(len(prices.classes)), np.zeros(len(prices.classes))
    for (survivals, class_ids, num_requests, _), plan in zip(groups, plans, strict=True):
        ends = np.concatenate([[0], np.cumsum(num_requests)])
        for rank, budget in enumerate(plan.budgets()):
            rows = slice(ends[rank], ends[rank + 1])
            caps = np.full(num_requests[rank], survivals.shape[1])
            lens = allocate_classes(
                survivals[rows],
                budget.max_draft_tokens,
                budget.min_survival,
                caps,
                class_ids[rows],
                prices.classes,
                prices.weights().tolist(),
            )
            taken = np.arange(survivals.shape[1]) < lens[:, None]
            tokens = 1.0 + (survivals[rows] * taken).sum(axis=1, dtype=np.float64)
            num = len(rate)
            rate += np.bincount(class_ids[rows], weights=tokens, minlength=num) / plan.step_time_s
            requests += np.bincount(class_ids[rows], minlength=num)
    return np.where(requests > 0, rate / np.maximum(requests, 1), np.nan)
