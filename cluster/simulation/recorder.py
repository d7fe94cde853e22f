"""What a run showed: throughput, tokens a second and user, budgets, waste, latencies, by rank and tenant.

Throughput counts expected committed tokens (one and the survivals of what was verified): the mean of what chance would
accept, without its noise. The tokens that were accepted by chance are counted too, as a check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.simulation.ranks import SimulatedRank
from cluster.simulation.scenario import Scenario, System

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]


@dataclass
class StepRecord:
    """One step of a group; arrays are [n] by rank."""

    started_s: float
    num_requests: Int64
    batch_tokens: Int64
    scheduled: Int64
    committed: Int64
    prefill_tokens: Int64
    expected: Float64
    tenants: list[tuple[Int64, Float64]] = field(default_factory=list)  # of each rank's rows
    step_time_s: float = 0.0

    @classmethod
    def empty(cls, num_ranks: int, now: float) -> StepRecord:
        requests, tokens, scheduled, committed, prefill = np.zeros((5, num_ranks), np.int64)
        return cls(now, requests, tokens, scheduled, committed, prefill, np.zeros(num_ranks))

    def add_rank(
        self,
        at: int,
        rank: SimulatedRank,
        rows: Rows,
        lens: npt.NDArray[np.integer],
        committed: Int64,
        expected: Float64,
        prefill: int,
    ) -> None:
        self.num_requests[at] = len(rows)
        self.scheduled[at] = lens.sum()
        self.batch_tokens[at] = len(rows) + lens.sum() + prefill
        self.committed[at] = committed.sum()
        self.prefill_tokens[at] = prefill
        self.expected[at] = expected.sum()
        self.tenants.append((rank.tenant[rows], expected))

    def by_tenant(self, num: int) -> tuple[Int64, Float64]:
        """Rounds and expected tokens of each tenant: [C]."""
        rounds, tokens = np.zeros(num, np.int64), np.zeros(num)
        for tenants, expected in self.tenants:
            rounds += np.bincount(tenants, minlength=num)
            tokens += np.bincount(tenants, weights=expected, minlength=num)
        return rounds, tokens


@dataclass(frozen=True)
class Result:
    """Rates are of the whole cluster unless they say otherwise."""

    system: str
    throughput: float  # expected committed tokens a second
    throughput_per_rank: float
    sampled_throughput: float  # tokens that chance accepted
    tps: float  # tokens a second and user: what a request in decoding sees
    budget_per_request: float  # verified tokens of a round, anchor included
    acceptance_length: float
    concurrency_per_rank: float
    step_time_s: float
    batch_tokens_max_over_mean: float
    ttft_p50_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    by_tenant: dict[str, dict[str, float]]
    budget_by_rank: list[float]

    def row(self) -> dict[str, Any]:
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in vars(self).items()
        }


class Recorder:
    """Sums over the measured steps of all groups."""

    def __init__(self, scenario: Scenario, system: System) -> None:
        self._system = system
        self._tenants = scenario.tenants
        self._num_groups = scenario.machine.num_groups
        n = scenario.machine.ranks_per_group
        self._seconds = self._expected = self._sampled = 0.0
        self._rounds, self._scheduled = np.zeros(n), np.zeros(n)
        self._user_seconds = 0.0
        self._steps = 0
        self._unevenness = 0.0
        num = len(self._tenants)
        self._tenant_tokens, self._tenant_seconds = np.zeros(num), np.zeros(num)
        self._ttft: list[float] = []
        self._tpot: list[float] = []

    def step(self, record: StepRecord) -> None:
        seconds = record.step_time_s
        self._steps += 1
        self._seconds += seconds
        self._expected += float(record.expected.sum())
        self._sampled += float(record.committed.sum())
        self._rounds += record.num_requests
        self._scheduled += record.scheduled
        self._user_seconds += float(record.num_requests.sum()) * seconds
        mean = float(record.batch_tokens.mean())
        self._unevenness += float(record.batch_tokens.max()) / mean if mean else 1.0
        rounds, tokens = record.by_tenant(len(self._tenants))
        self._tenant_tokens += tokens
        self._tenant_seconds += rounds * seconds

    def finished(self, rank: SimulatedRank, rows: Rows, now: float) -> None:
        """Latencies of requests that have ended."""
        self._ttft.extend((rank.first_s[rows] - rank.arrived_s[rows]).tolist())
        several = rows[rank.output[rows] > 1]
        spans = (now - rank.first_s[several]) / (rank.output[several] - 1)
        self._tpot.extend(spans.tolist())

    def result(self) -> Result:
        seconds = max(self._seconds, 1e-12) / self._num_groups
        rounds, steps = max(float(self._rounds.sum()), 1.0), max(self._steps, 1)
        ranks = self._num_groups * len(self._rounds)
        throughput = self._expected / seconds
        return Result(
            system=self._system.name,
            throughput=throughput,
            throughput_per_rank=throughput / ranks,
            sampled_throughput=self._sampled / seconds,
            tps=self._expected / max(self._user_seconds, 1e-12),
            budget_per_request=1.0 + float(self._scheduled.sum()) / rounds,
            acceptance_length=self._expected / rounds,
            concurrency_per_rank=rounds / steps / len(self._rounds),
            step_time_s=self._seconds / steps,
            batch_tokens_max_over_mean=self._unevenness / steps,
            ttft_p50_s=_percentile(self._ttft, 50),
            tpot_p50_s=_percentile(self._tpot, 50),
            tpot_p99_s=_percentile(self._tpot, 99),
            by_tenant=self._by_tenant(),
            budget_by_rank=(1.0 + self._scheduled / np.maximum(self._rounds, 1)).round(3).tolist(),
        )

    def _by_tenant(self) -> dict[str, dict[str, float]]:
        total = max(float(self._tenant_tokens.sum()), 1e-12)
        return {
            tenant.name: {
                "share": round(float(tokens) / total, 4),
                "tps": round(float(tokens / seconds) if seconds else 0.0, 4),
            }
            for tenant, tokens, seconds in zip(
                self._tenants, self._tenant_tokens, self._tenant_seconds, strict=True
            )
        }


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0
