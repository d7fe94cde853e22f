"""What a rank's decisions cost a step: `python -m tests.pure.rank_benchmark`. A benchmark, not a test: machines differ.

To be held against a step of the default model (about 25 ms on two cores): deciding should stay below two per cent.
"""

import random
import sys
import time

import numpy as np

from actors.core.layout import StepPlan, StepResult
from actors.core.messages import CommitBatch, Endpoint, Message, ProposalBatch
from tests.pure.rank_harness import admitted, make_rank
from tests.pure.scripted_drafter import ALLOCATOR, DRAFTER

GAMMA, TOP_K = 5, 64


def accept_some(plan: StepPlan, rng: random.Random, features: np.ndarray) -> StepResult:
    accepted = np.array([rng.randint(0, n) for n in plan.verify_len.tolist()], np.int32)
    own = np.where(plan.samples, 7, -1).astype(np.int32)
    return StepResult(accepted, own, features[: plan.batch_tokens])


def answer(out: list[tuple[Endpoint, Message]], rng: np.random.Generator) -> ProposalBatch:
    (commit,) = [m for _, m in out if isinstance(m, CommitBatch)]
    wants = np.flatnonzero(commit.wants_block)
    count = len(wants)
    return ProposalBatch(
        DRAFTER.name,
        tuple(commit.request_ids[i] for i in wants.tolist()),
        commit.generations[wants],
        commit.committed_lens[wants],
        rng.integers(0, 50, (count, GAMMA), np.int32),
        rng.random((count, GAMMA), np.float32),
        rng.integers(0, 50, (count, GAMMA, TOP_K), np.int32),
        np.full((count, GAMMA, TOP_K), 1 / TOP_K, np.float32),
        0.01,
    )


def median_seconds(num_requests: int = 32, num_steps: int = 400) -> float:
    """Median of planning a step, applying its result and taking the next proposals."""
    rank = make_rank(
        gamma=GAMMA,
        max_running=num_requests,
        max_batch_tokens=256,
        max_model_len=2048,
        block_size=16,
        num_blocks=4096,
    )
    rank.allocator = ALLOCATOR
    rank.set_drafters([DRAFTER])
    for i in range(num_requests):
        rank.on_message(admitted(f"r{i}", [i] * 8, 2000), 0.0)
    rng, draws = random.Random(0), np.random.default_rng(0)
    features = np.zeros((256, 2880), np.uint16)
    times = []
    for step in range(num_steps):
        now = step * 1.0
        started = time.perf_counter()
        plan = rank.plan_step(now)
        planned = time.perf_counter()
        assert plan is not None and plan.num_requests == num_requests
        result = accept_some(plan, rng, features)
        applying = time.perf_counter()
        out = rank.apply(plan, result, now, 0.025)
        applied = time.perf_counter()
        proposal = answer(out, draws)
        receiving = time.perf_counter()
        rank.on_message(proposal, now)
        received = time.perf_counter()
        times.append((planned - started) + (applied - applying) + (received - receiving))
    return float(np.median(times[num_steps // 5 :]))


if __name__ == "__main__":
    for size in (1, 8, 32):
        sys.stdout.write(f"{size:>3} requests: {median_seconds(size) * 1e3:.3f} ms a step\n")
