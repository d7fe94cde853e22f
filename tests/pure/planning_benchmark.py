"""How long a joint plan takes: a table, as JSON on its last line.

`OMP_NUM_THREADS=1 python -m tests.pure.planning_benchmark`: with more, a second BLAS thread's waiting counts as work.

Everything from lagged survivals and the learned model to one budget a rank is counted. Processor time, so that a busy
machine does not show.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from actors.core.cost import LockstepModel, RankStep
from actors.core.joint import plan_group
from tests.pure.lockstep import staircase

SIZES = (64, 128, 256, 512, 1024)


def best_seconds(num_ranks: int, num_requests: int, gamma: int, repeats: int = 7) -> float:
    """The least processor time of a plan, after one to warm up."""
    rng = np.random.default_rng(num_ranks)
    rows = num_ranks * num_requests
    survivals = np.cumprod(rng.beta(4, 1.5, (rows, gamma)).astype(np.float32), axis=1)
    requests = np.full(num_ranks, num_requests)
    curve = staircase(2 * num_requests * (gamma + 1), 64, 0.020, 0.003)
    model = LockstepModel(num_ranks)
    model.rank_scale = rng.uniform(0.95, 1.05, num_ranks)  # no two ranks are alike
    steps = [RankStep(curve, num_requests, num_requests, 1000 * num_requests)] * num_ranks
    incumbent = requests * 2
    times = []
    for _ in range(repeats + 1):
        started = time.process_time()
        plan = plan_group(survivals, requests, model.times(steps), 0.01, incumbent=incumbent)
        budgets = plan.budgets()
        times.append(time.process_time() - started)
        assert len(budgets) == num_ranks and plan.max_draft_tokens.any()
    return min(times[1:])


def main() -> None:
    found = {}
    sys.stdout.write("ranks  slots     ms  ns a slot\n")
    for ranks in SIZES:
        seconds = best_seconds(ranks, 256, 7)
        slots = ranks * 256 * 7
        found[ranks] = round(seconds * 1e3, 3)
        sys.stdout.write(
            f"{ranks:5}  {slots:7}  {seconds * 1e3:5.2f}  {seconds / slots * 1e9:.1f}\n"
        )
    sys.stdout.write(json.dumps({"planning_ms_by_ranks": found}) + "\n")


if __name__ == "__main__":
    main()
