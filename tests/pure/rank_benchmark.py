"""What a rank's decisions cost a step: `python -m tests.pure.rank_benchmark`. A benchmark, not a test: machines differ.

To be held against a step of the default model (about 25 ms on two cores): deciding should stay below 2 % of it.
Deciding is `decide` and `choose_drafting`, with the searches of a rank that is left alone.
"""

import random
import sys
import time

import numpy as np

from actors.core.layout import StepPlan, StepResult
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, Endpoint, Message, ProposalBatch, RankProfile
from actors.core.prefix_scheduler import allocate
from actors.core.service_class import ClassAllocation, ServiceClass
from actors.core.sps import CostCurve
from actors.timing import TimedDecider
from tests.pure.rank_harness import admitted, make_rank
from tests.pure.scripted_drafter import ALLOCATOR, DRAFTER, RANK

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


def alone(with_classes: bool) -> TimedDecider:
    """The decider of a rank without a budget: it searches its own curve in every step."""
    policy = LocalPolicy("lagged")
    sizes = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256], np.int32)
    times, drafting = 0.02 + 3e-4 * sizes, 0.004 + 1e-4 * sizes
    policy.times.measured(CostCurve.of(RankProfile(RANK, "", sizes, sizes, times, drafting, GAMMA)))
    classes = ClassAllocation([ServiceClass("a", 2.0), ServiceClass("b", min_verify_len=1)])
    return TimedDecider(
        RANK.name, RANK.epoch, policy, allocate, policy.drafting, classes if with_classes else None
    )


def measure(
    num_requests: int = 32, num_steps: int = 400, with_classes: bool = False
) -> tuple[float, float]:
    """Median seconds of planning a step, applying its result and taking the next proposals; and of deciding."""
    rank = make_rank(
        gamma=GAMMA,
        max_running=num_requests,
        max_batch_tokens=256,
        max_model_len=2048,
        block_size=16,
        num_blocks=4096,
    )
    rank.allocator = ALLOCATOR
    rank.decider = decider = alone(with_classes)
    rank.set_drafters([DRAFTER])
    for i in range(num_requests):
        rank.on_message(admitted(f"r{i}", [i] * 8, 2000), 0.0)
    rng, draws = random.Random(0), np.random.default_rng(0)
    features = np.zeros((256, 2880), np.uint16)
    times, deciding = [], []
    for step in range(num_steps):
        now, decided = step * 1.0, decider.seconds
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
        deciding.append(decider.seconds - decided)
    skip = num_steps // 5
    return float(np.median(times[skip:])), float(np.median(deciding[skip:]))


if __name__ == "__main__":
    for size in (1, 8, 32):
        for with_classes in (False, True):
            step_s, decision_s = measure(size, with_classes=with_classes)
            sys.stdout.write(
                f"{size:>3} requests{', classes' if with_classes else '':9}: {step_s * 1e3:.3f} ms a step, "
                f"{decision_s * 1e3:.3f} of them to decide\n"
            )
