"""Which requests come, and where to: synthetic ones by tenant, open-loop arrivals, recorded traces."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cluster.console import CommandError
from cluster.simulation.ranks import Job
from cluster.simulation.scenario import Open, Scenario

Float64 = npt.NDArray[np.float64]


class JobSource:
    """Draws requests. Each rank has its own mix of tenants and its own sequence, whatever the others do."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._tenants = scenario.tenants
        n = scenario.machine.ranks_per_group
        self._num_ranks = n * scenario.machine.num_groups
        mix = [_mix(scenario, rank) for rank in range(n)]
        self._mix = [mix[rank % n] for rank in range(self._num_ranks)]
        self._rngs = [np.random.default_rng((seed, 7, rank)) for rank in range(self._num_ranks)]
        self._drawn = [0] * self._num_ranks

    def next(self, rank: int, now: float) -> Job:
        """The next request of a rank (its index in the cluster)."""
        rng = self._rngs[rank]
        tenant = int(rng.choice(len(self._tenants), p=self._mix[rank]))
        spec = self._tenants[tenant]
        prompt = int(rng.geometric(1 / spec.prompt_tokens)) if spec.prompt_tokens >= 1 else 0
        output = int(rng.geometric(1 / spec.output_tokens))
        return self.given(rank, now, tenant, prompt, output)

    def given(self, rank: int, now: float, tenant: int, prompt: int, output: int) -> Job:
        """A request as recorded."""
        self._drawn[rank] += 1
        number = self._drawn[rank] * self._num_ranks + rank
        context = int(self._tenants[tenant].context_tokens)
        return Job(number, tenant, prompt, output, context, now)


def _mix(scenario: Scenario, rank: int) -> Float64:
    """Probabilities of the tenants on one rank."""
    shares = np.array(
        [
            tenant.share * (tenant.rank_shares[rank] if tenant.rank_shares else 1.0)
            for tenant in scenario.tenants
        ]
    )
    if not shares.sum():
        raise CommandError(f"rank_shares: no tenant has a share on rank {rank}; give it one", 2)
    normalised: Float64 = shares / shares.sum()
    return normalised


class Arrivals:
    """Open-loop arrivals: gamma-distributed gaps, or the rows of a trace."""

    def __init__(self, scenario: Scenario, load: Open, jobs: JobSource) -> None:
        self._jobs, self._load = jobs, load
        self._rng = np.random.default_rng((scenario.seed, 11))
        self._num_ranks = scenario.machine.num_groups * scenario.machine.ranks_per_group
        shares = np.resize(np.array(load.rank_shares or [1.0]), self._num_ranks)
        self._shares = shares / shares.sum()
        names = [tenant.name for tenant in scenario.tenants]
        self._rows = iter(_read_trace(load.trace, names)) if load.trace else None
        self._row: tuple[float, int, int, int] | None = None
        self._now = 0.0

    def next_time(self) -> float | None:
        """When the next request comes; None when the trace has ended."""
        if self._rows is not None:
            self._row = next(self._rows, None)
            return None if self._row is None else self._row[0]
        shape = self._load.burstiness
        self._now += float(self._rng.gamma(shape, 1.0 / (shape * self._load.rate_per_s)))
        return self._now

    def take(self, now: float, loads: list[int]) -> tuple[Job, int]:
        """The request that has come, and the rank it goes to."""
        if self._load.routing == "least_loaded":
            rank = int(np.argmin(loads))
        else:
            rank = int(self._rng.choice(self._num_ranks, p=self._shares))
        if self._row is None:
            return self._jobs.next(rank, now), rank
        _, tenant, prompt, output = self._row
        return self._jobs.given(rank, now, tenant, prompt, output), rank


def _read_trace(name: str, tenants: list[str]) -> list[tuple[float, int, int, int]]:
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"load.trace = {name!r}: no such file", 2)
    rows = []
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            try:
                tenant = tenants.index(row["tenant"])
                rows.append((float(row["time_s"]), tenant, int(row["prompt"]), int(row["output"])))
            except (KeyError, ValueError) as error:
                raise CommandError(
                    f"load.trace line {number}: {error}; columns are time_s,tenant,prompt,output, "
                    f"tenants are {', '.join(tenants)}",
                    2,
                ) from None
    return sorted(rows)
