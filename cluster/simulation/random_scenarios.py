"""Random configurations: groups, costs, tenants and loads of all sizes, every rank loaded alike or each its own way."""

from __future__ import annotations

import numpy as np

from cluster.simulation.scenario import (
    Acceptance,
    Closed,
    Curve,
    Machine,
    Scenario,
    Shared,
    Tenant,
)


def drawn(scenario: Scenario, number: int) -> Scenario:
    """The scenario with a machine, tenants and a load of its own; systems and measure stay.

    `scenario.skew` is the deviation of the logarithm of each rank's load about the common one; with skew, half of the
    ranks also serve a tenant whose drafts survive less often.
    """
    rng = np.random.default_rng((scenario.seed, number))
    ranks = int(rng.choice([2, 4, 8]))
    gamma = int(rng.integers(3, 8))
    requests = int(np.exp(rng.uniform(0, np.log(128))))
    base_s = float(rng.uniform(0.005, 0.04))
    # From tokens that are nearly free to tokens that dominate the step.
    per_token_s = base_s * float(np.exp(rng.uniform(np.log(3e-4), np.log(2e-2))))
    shared_s = per_token_s * float(rng.choice([0.0, 0.02, 0.2]))
    curve = Curve(
        base_s=base_s,
        per_token_s=per_token_s,
        tread=int(rng.choice([1, 8, 32])),
        draft_base_s=0.03 * base_s,
        draft_per_request_s=0.1 * per_token_s,
    )
    shared = Shared(tokens=[0, 4096], seconds=[0.1 * base_s, 0.1 * base_s + 4096 * shared_s])
    tenants = [Tenant(name="all", acceptance=_acceptance(rng, gamma), output_tokens=64)]
    per_rank = [requests] * ranks
    if scenario.skew:
        per_rank = [max(1, int(requests * np.exp(rng.normal(0, scenario.skew)))) for _ in per_rank]
        half = [float(at % 2) for at in range(ranks)]
        rest = [1.0 - share for share in half]
        other = _acceptance(rng, gamma)
        tenants = [
            tenants[0].model_copy(update={"rank_shares": half}),
            Tenant(name="other", acceptance=other, output_tokens=64, rank_shares=rest),
        ]
    title = f"{number}: {ranks} ranks, {requests} requests, gamma {gamma}, tread {curve.tread}"
    return scenario.model_copy(
        update={
            "title": title,
            "machine": Machine(
                ranks_per_group=ranks, curve=curve, shared=shared, noise=scenario.machine.noise
            ),
            "tenants": tenants,
            "load": Closed(requests_per_rank=per_rank, lifetime="rounds"),
            "systems": [s.model_copy(update={"gamma": gamma}) for s in scenario.systems],
        }
    )


def _acceptance(rng: np.random.Generator, gamma: int) -> Acceptance:
    first = float(rng.uniform(0.5, 0.95))
    later = np.clip(first + rng.uniform(-0.1, 0.05, gamma), 0.2, 0.97)
    return Acceptance(
        means=[[first, *map(float, later[1:])]],
        concentration=float(np.exp(rng.uniform(0, np.log(20)))),
        persistence=float(rng.choice([0.0, 0.5, 0.9])),
    )
