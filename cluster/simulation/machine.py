"""The hardware that is simulated: how long a lockstep step takes. Policies see profiles and reports only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.group_times import GroupTimes, SharedTime, drafting_s
from actors.core.messages import Endpoint, RankProfile
from actors.core.sps import CostCurve
from cluster.simulation.scenario import Curve, Machine

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

IDENTITY = "simulated"


def cost_curve(curve: Curve, gamma: int, drafting: float) -> CostCurve:
    """The true curve of one rank, drafting included."""
    tokens, times = _points(curve)
    requests = np.array([1.0, max(tokens[-1], 2.0)])
    draft = (curve.draft_base_s + curve.draft_per_request_s * requests) * drafting
    return CostCurve(IDENTITY, tokens, times, requests, draft, gamma, False)


def _points(curve: Curve) -> tuple[Float64, Float64]:
    if curve.batch_tokens:
        times = np.maximum.accumulate(np.array(curve.step_time_s, np.float64))
        return np.array(curve.batch_tokens, np.float64), times
    ends = np.arange(curve.tread, curve.max_tokens + curve.tread, curve.tread, dtype=np.float64)
    # The middle of a tread lies on the line: treads cost nothing on average.
    times = curve.base_s + curve.per_token_s * (ends - 0.5 * (curve.tread - 1))
    if curve.tread == 1:
        return ends[[0, -1]], times[[0, -1]]
    tokens = np.sort(np.concatenate([ends, ends[:-1] + 1]))
    return tokens, np.sort(np.concatenate([times, times[1:]]))


@dataclass(frozen=True)
class Hardware:
    """One lockstep group. All groups are alike."""

    curve: CostCurve
    shared: SharedTime
    speed: Float64  # [n] factor on each rank's time

    @classmethod
    def of(cls, machine: Machine, gamma: int, drafting: float) -> Hardware:
        shared = SharedTime(np.array(machine.shared.tokens), np.array(machine.shared.seconds))
        speed = np.ones(machine.ranks_per_group)
        speed[: len(machine.rank_speed)] = machine.rank_speed
        return cls(cost_curve(machine.curve, gamma, drafting), shared, speed)

    def step_time_s(self, num_requests: Int64, batch_tokens: Int64, pad_to_max: bool) -> float:
        """T of a step. Padded, every rank runs as many tokens as the fullest one, and the group carries them all."""
        if pad_to_max:
            batch_tokens = np.full_like(batch_tokens, batch_tokens.max())
        drafting = drafting_s(self.curve, num_requests)
        times = GroupTimes(
            (self.curve,) * len(self.speed),
            self.speed,
            self.speed * drafting,
            batch_tokens,
            self.shared,
        )
        return times.step_time_s(np.zeros(len(self.speed)))

    def profile(self, rank: Endpoint, num_loaded: int) -> RankProfile:
        """What is measured at start: complete steps, so many ranks loaded alike and the others empty."""
        tokens = self.curve.batch_tokens.astype(np.int32)
        shared = self.shared(tokens.astype(np.float64) * num_loaded)
        requests = np.maximum(tokens, 1)
        return RankProfile(
            rank,
            IDENTITY,
            tokens,
            requests,
            self.curve.verify_time_s(tokens) + shared,
            drafting_s(self.curve, requests),
            self.curve.gamma,
        )
