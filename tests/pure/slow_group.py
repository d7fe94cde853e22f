"""A lockstep group in which ranks differ in speed, served by the allocator's own code; only times are made up.

A step lasts as long as its slowest rank's own part, and then as long as the slowest takes for what all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.core.capacity import Allocator
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, RankProfile, StepReport, VerifyBudget
from actors.core.prefix_scheduler import allocate

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Mean survivals of the shipped drafter at temperature 0.
SURVIVAL = np.array([0.6, 0.35, 0.18, 0.09, 0.045, 0.02])
GAMMA = len(SURVIVAL)
DRAFTING_S = 0.01
POINTS = np.array([1, 2, 4, 8, 16, 24, 32, 48, 64])


@dataclass
class SlowGroup:
    """One group under load.

    Args:
        speed: [n] factor on the time of each rank.
        measured_speed: the same when the ranks measured themselves; None: as it is.
        is_told: ranks tell what of a step they did for their own tokens.
    """

    speed: Sequence[float]
    streams: int
    measured_speed: Sequence[float] | None = None
    is_told: bool = True
    ranks: list[Endpoint] = field(init=False)
    budgets: dict[str, list[VerifyBudget]] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [Endpoint(f"rank-{i}", "target", "", "", "a") for i in range(len(self.speed))]
        names = [rank.name for rank in self.ranks]
        self.budgets = {name: [] for name in names}
        self.solver = JointSolver([names], is_lockstep=False)
        self.brain = Allocator(policy="joint", solver=self.solver)
        self._rng = np.random.default_rng(0)
        measured = self.speed if self.measured_speed is None else self.measured_speed
        whole = np.array([step_time_s(measured, np.full(len(measured), b)) for b in POINTS])
        for rank, speed in zip(self.ranks, measured, strict=True):
            shared = whole - speed * own_s(POINTS)
            profile = RankProfile(
                rank,
                "here",
                POINTS.astype(np.int32),
                np.minimum(POINTS, 8).astype(np.int32),
                whole,
                np.full(len(POINTS), DRAFTING_S),
                GAMMA,
                shared if self.is_told else None,
            )
            self.brain.fold(profile, 0.0)

    def serve(self, num_steps: int) -> tuple[Float64, float]:
        """Draft tokens a request [n] and expected tokens a second, both over the last half of the steps."""
        num, lengths, tokens, seconds = len(self.speed), [], 0.0, 0.0
        for step in range(num_steps):
            rows = [self._survivals() for _ in range(num)]
            lens = [self._lens(*pair, step) for pair in zip(self.ranks, rows, strict=True)]
            drafts = np.array([of_rank.sum() for of_rank in lens])
            served_s = step_time_s(self.speed, self.streams + drafts)
            self._report(step, rows, drafts, served_s * float(np.exp(self._rng.normal(0, 0.03))))
            if step >= num_steps // 2:
                lengths.append(drafts / self.streams)
                seconds += served_s + DRAFTING_S
                tokens += num * self.streams + sum(
                    float(row[:length].sum())
                    for of_rank in zip(rows, lens, strict=True)
                    for row, length in zip(*of_rank, strict=True)
                )
        return np.mean(lengths, axis=0), tokens / seconds

    def _survivals(self) -> Float32:
        return survivals(self._rng, self.streams)

    def _lens(self, rank: Endpoint, rows: Float32, step: int) -> npt.NDArray[np.int32]:
        lawful = [b for b in self.budgets[rank.name] if b.for_step <= step <= b.expires_step]
        if not lawful:
            return np.full(len(rows), 2, np.int32)
        budget = lawful[-1]
        caps = np.full(len(rows), GAMMA)
        return allocate(rows, budget.max_draft_tokens, budget.min_survival, caps)

    def _report(self, step: int, rows: list[Float32], drafts: Int64, served_s: float) -> None:
        blocks, none = np.full(GAMMA, self.streams), np.zeros(GAMMA, np.int64)
        for rank, speed, shown, verified in zip(self.ranks, self.speed, rows, drafts, strict=True):
            tokens = self.streams + int(verified)
            own = speed * float(own_s(tokens))
            self.brain.fold(
                StepReport(
                    rank, step, served_s, DRAFTING_S, self.streams, 0, tokens, 0, shown,
                    blocks, none, none, self.streams, 9, 9, 0, "joint", int(verified),
                    shared_time_s=served_s - own if self.is_told else None,
                ),
                0.0,
            )  # fmt: skip
        for budget in self.brain.budgets(0.0):
            self.budgets[budget.rank] = [*self.budgets[budget.rank][-9:], budget]


def own_s(tokens: npt.ArrayLike) -> Float64:
    """What a rank of speed one does for its own tokens: weights are read once, then every token costs."""
    seconds: Float64 = 0.020 + 0.0022 * np.maximum(np.asarray(tokens) - 4.0, 0.0)
    return seconds


def step_time_s(speed: Sequence[float], tokens: npt.ArrayLike) -> float:
    """T of a step of `tokens` [n]."""
    counts = np.asarray(tokens)
    shared = max(speed) * (0.008 + 0.0008 * float(counts.sum()))
    return float((np.asarray(speed) * own_s(counts)).max()) + shared


def survivals(rng: np.random.Generator, num_rows: int) -> Float32:
    """[num_rows, GAMMA] some streams are foreseen better than others."""
    rows = np.clip(SURVIVAL * rng.lognormal(0, 0.5, (num_rows, 1)), 0, 0.98)
    return rows.astype(np.float32)


def best_split(speed: Sequence[float], streams: int) -> tuple[float, Float64]:
    """By trying all: the best tokens a second, and the draft tokens a request of each rank [n]."""
    ranked = np.sort(survivals(np.random.default_rng(1), streams * 200).ravel())[::-1]
    gained = np.concatenate([[0.0], np.cumsum(ranked)])[::200] / 200
    of_kind = [np.flatnonzero(np.asarray(speed) == kind) for kind in sorted(set(speed))]
    best, found = 0.0, np.zeros(len(speed))
    for counts in np.ndindex(*[streams * GAMMA + 1] * len(of_kind)):
        drafts = np.zeros(len(speed), np.int64)
        for ranks, count in zip(of_kind, counts, strict=True):
            drafts[ranks] = count
        tokens = len(speed) * streams + float(gained[drafts].sum())
        rate = tokens / (step_time_s(speed, streams + drafts) + DRAFTING_S)
        if rate > best:
            best, found = rate, drafts / streams
    return best, found


def best_equal(speed: Sequence[float], streams: int) -> float:
    """Tokens a second with the best common length."""
    mean = survivals(np.random.default_rng(1), 4000).mean(axis=0)
    rates = []
    for length in range(GAMMA + 1):
        tokens = len(speed) * streams * (1 + float(mean[:length].sum()))
        of_each = np.full(len(speed), streams * (1 + length))
        rates.append(tokens / (step_time_s(speed, of_each) + DRAFTING_S))
    return max(rates)
