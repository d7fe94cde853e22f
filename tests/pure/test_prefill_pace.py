"""Long prompts beside running streams: the gap between two tokens stays within a factor of the usual step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from actors.core.layout import StepPlan, StepResult
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, ProposalBatch, RankProfile, TokenDeltas
from actors.core.prefill_pace import PrefillPace
from actors.core.sps import CostCurve, RankTimes
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER, RANK, VOCAB

SIZES = np.array([1, 8, 16, 32, 64, 128, 256], np.int32)
LINEAR_S = 0.010 + 0.0006 * SIZES  # a CPU: a token costs something from the first one on
STAIRS_S = np.array([0.010, 0.010, 0.010, 0.011, 0.012, 0.020, 0.040])  # a GPU: free up to a point


def times_of(step_time_s: np.ndarray) -> RankTimes:
    none = np.zeros(len(SIZES))
    profile = RankProfile(RANK, "test", SIZES, SIZES, step_time_s, none, gamma=3)
    times = RankTimes()
    times.measured(CostCurve.of(profile))
    return times


@pytest.mark.parametrize("step_time_s", [LINEAR_S, STAIRS_S])
def test_a_step_takes_at_most_so_many_times_as_long(step_time_s: np.ndarray) -> None:
    times = times_of(step_time_s)
    pace = PrefillPace(2.5, times)
    for num_rounds, num_drafts in ((1, 0), (4, 3), (20, 20), (100, 0)):
        most = pace.most_tokens(num_rounds, num_drafts, 250)
        size = num_rounds + num_drafts + most
        alone, beside, beyond = times.round_time_s_at(np.array([num_rounds, size, size + 1]), 0)
        assert beside <= 2.5 * alone
        assert most == 250 or beyond > 2.5 * alone


def test_a_prompt_always_advances_and_alone_it_takes_the_whole_step() -> None:
    cliff = times_of(np.array([1e-4, 1, 1, 1, 1, 1, 1]))
    pace = PrefillPace(1.5, cliff)
    assert pace.most_tokens(1, 0, 99) == 1
    assert pace.most_tokens(0, 0, 99) == 99
    assert (pace.most_tokens(5, 0, 0), pace.most_tokens(5, 0, 1)) == (0, 1)
    assert PrefillPace(1.5, None).most_tokens(5, 0, 99) == 99
    assert PrefillPace(1.5, RankTimes()).most_tokens(5, 0, 99) == 99


class QuickTarget:
    """Accepts every other draft."""

    def step(self, plan: StepPlan) -> StepResult:
        accepted = plan.verify_len // 2
        return StepResult(accepted, np.where(plan.samples, 7, -1).astype(np.int32), None)


class QuickDrafter:
    """Blocks without thought, as confident as chance will have it."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def close(self, request_ids: tuple[str, ...]) -> None:
        pass

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        wanted = np.flatnonzero(batch.wants_block)
        shape = (len(wanted), 3)
        return ProposalBatch(
            DRAFTER.name,
            tuple(batch.request_ids[i] for i in wanted.tolist()),
            batch.generations[wanted],
            batch.committed_lens[wanted],
            np.full(shape, 7, np.int32),
            self.rng.random(shape, np.float32),
            np.full((*shape, 1), 7, np.int32),
            np.ones((*shape, 1), np.float32),
            0.0,
        )


def flood(stretch: float, seconds: Callable[[StepPlan, int], float]) -> tuple[float, list[float]]:
    """The median step of four streams alone, and their gaps while three prompts of 4096 tokens are computed."""
    policy = LocalPolicy("lagged")
    policy.times = times_of(LINEAR_S)
    rank = make_rank(
        policy,
        num_blocks=1024,
        block_size=16,
        max_model_len=8192,
        max_batch_tokens=256,
        max_step_stretch=stretch,
    )
    session = Session(rank, target=QuickTarget(), drafter=QuickDrafter())
    streams = [f"s{i}" for i in range(4)]
    for name in streams:
        session.submit(admitted(name, [len(name), 5, int(name[1])], 3000))
    last_at: dict[str, float] = {}
    alone: list[float] = []
    gaps: list[float] = []

    def step() -> None:
        plan = rank.plan_step(session.now)
        assert plan is not None and rank._in_flight is not None
        took_s = seconds(plan, rank._in_flight.num_prefill_tokens)
        session.now += took_s
        out = rank.apply(plan, session.target.step(plan), session.now, took_s)
        session.deliver(out)
        if not rank.book.prefilling and not gaps:
            alone.append(took_s)
        for _, message in out:
            for delta in message.deltas if isinstance(message, TokenDeltas) else ():
                if delta.request_id in last_at and delta.request_id in streams and is_flooded:
                    gaps.append(session.now - last_at[delta.request_id])
                last_at[delta.request_id] = session.now

    is_flooded = False
    for _ in range(20):
        step()
    is_flooded = True
    for number in range(3):
        prompt = [(i * i + number) % VOCAB for i in range(4096)]
        session.submit(admitted(f"long{number}", prompt, 2))
    while any(name.startswith("long") for name in rank.book.live):
        step()
    return float(np.median(alone[5:])), gaps


def as_measured(plan: StepPlan, _num_prefill: int) -> float:
    return 0.010 + 0.0006 * plan.batch_tokens


def dear_prompts(plan: StepPlan, num_prefill: int) -> float:
    """Prompt tokens cost twice what the curve says."""
    return 0.010 + 0.0006 * (plan.batch_tokens + num_prefill)


def test_under_a_flood_of_long_prompts_no_gap_is_three_times_the_median_step() -> None:
    median_s, gaps = flood(2.5, as_measured)
    assert len(gaps) > 400
    assert max(gaps) < 3 * median_s
    assert np.median(gaps) > 2 * median_s, "prompts use what they are given"


def test_without_a_bound_the_gaps_are_longer() -> None:
    median_s, gaps = flood(1000.0, as_measured)
    assert max(gaps) > 6 * median_s


def test_prompts_dearer_than_the_curve_says_are_paced_once_that_is_seen() -> None:
    median_s, gaps = flood(2.5, dear_prompts)
    assert max(gaps[:40]) > 3 * median_s
    assert max(gaps[len(gaps) // 2 :]) < 3 * median_s
