"""Unseeded streams through a rank keep the target's law, whatever decides the verify lengths (C1, C3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.core import rank as rank_module
from actors.core.layout import StepPlan, StepResult
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, ProposalBatch, RankProfile
from actors.core.rank import Rank
from actors.core.sampling import SamplingParams
from actors.core.sps import CostCurve
from actors.core.verify_decision import StepFacts, VerifyChoice
from kernels.rejection import verify, verify_batch
from tests.pure.rank_harness import RANK, Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu.mutation import mutant

V, GAMMA, NUM_NEW, ANCHOR = 3, 2, 3, 0
P_AFTER = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.45, 0.1, 0.45]])
Q_AFTER = np.array([[0.4, 0.5, 0.1], [0.3, 0.4, 0.3], [0.2, 0.5, 0.3]])
# Confidence of a slot after a token: it tells the token before apart, as the counter-example of appendix A does.
CONFIDENCE_AFTER = np.array([0.8, 0.05, 0.99], np.float32)
NUM_STREAMS = 6000


class TableTarget:
    """Looks one token back; the real acceptance rule."""

    def step(self, plan: StepPlan) -> StepResult:
        batch = verify_batch(plan)
        logits = torch.from_numpy(np.log(P_AFTER)[plan.token_ids]).float()
        accepted, own = verify(logits[batch.token_rows], batch)
        features = np.zeros((plan.batch_tokens, 1), np.float32)
        return StepResult(accepted.int().numpy(), own.int().numpy(), features)


class TableDrafter:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def close(self, request_ids: tuple[str, ...]) -> None:
        pass

    def advance(self, commit: CommitBatch) -> ProposalBatch | None:
        wants = np.flatnonzero(commit.wants_block)
        count = len(wants)
        if not count:
            return None
        before = commit.anchor_token_ids[wants]
        draft = np.zeros((count, GAMMA), np.int32)
        confidences = np.zeros((count, GAMMA), np.float32)
        q_probs = np.zeros((count, GAMMA, V), np.float32)
        for slot in range(GAMMA):
            confidences[:, slot] = CONFIDENCE_AFTER[before]
            q_probs[:, slot] = Q_AFTER[before]
            uniform = self.rng.random((count, 1))
            before = (Q_AFTER[before].cumsum(axis=1) < uniform).sum(axis=1)
            draft[:, slot] = before
        q_ids = np.broadcast_to(np.arange(V, dtype=np.int32), q_probs.shape).copy()
        return ProposalBatch(
            DRAFTER.name,
            tuple(commit.request_ids[i] for i in wants.tolist()),
            commit.generations[wants],
            commit.committed_lens[wants],
            draft,
            confidences,
            q_ids,
            q_probs,
            0.0,
        )


def law_of_streams(num_new: int) -> npt.NDArray[np.float64]:
    """[V ** num_new] exact probabilities of the outputs after the prompt."""
    law = P_AFTER[ANCHOR]
    for _ in range(num_new - 1):
        law = (law[:, None] * P_AFTER[np.arange(len(law)) % V]).ravel()
    return law


def streams_of(
    rank: Rank, seed: int, drafter: TableDrafter | None = None, num_new: int = NUM_NEW
) -> npt.NDArray[np.float64]:
    """[V ** num_new] how often each output came."""
    rng = np.random.default_rng(seed)
    session = Session(rank, target=TableTarget(), drafter=drafter or TableDrafter(seed))
    counts = np.zeros((V,) * num_new)
    for start in range(0, NUM_STREAMS, 60):
        for i in range(start, start + 60):
            key = int(rng.integers(0, 2**63))
            message = admitted(str(i), [ANCHOR], num_new)
            session.submit(replace(message, sampling=SamplingParams(noise_key=key)))
        session.run()
        for i in range(start, start + 60):
            counts[tuple(session.streams.pop(str(i)).tokens)] += 1
    assert rank.check_idle() == []
    return counts.ravel()


def chi_squared(counts: npt.NDArray[np.float64]) -> float:
    expected = law_of_streams(round(np.log(counts.size) / np.log(V))) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


LIMIT = 60.0  # the 0.9998 quantile of chi-squared with 26 degrees of freedom


def staircase() -> CostCurve:
    tokens = np.array([1, 8, 16, 24, 40, 64], np.int32)
    seconds = np.array([1.0, 1.02, 1.3, 1.32, 2.0, 3.0])
    return CostCurve.of(RankProfile(RANK, "", tokens, tokens, seconds, np.zeros(6), GAMMA))


def small_rank(policy: Any, max_batch_tokens: int = 60) -> Rank:
    return make_rank(
        policy,
        gamma=GAMMA,
        vocab_size=V,
        max_running=15,
        max_waiting=60,
        max_batch_tokens=max_batch_tokens,
        max_model_len=8,
    )


@pytest.mark.parametrize(
    ("name", "max_batch_tokens"),
    [("static_threshold", 60), ("algorithm1", 60), ("lagged", 60), ("static_length", 20)],
)
def test_streams_follow_the_law_of_the_target(name: Any, max_batch_tokens: int) -> None:
    policy = LocalPolicy(name, static_length=2, static_threshold=0.5)
    policy.times.measured(staircase())
    rank = small_rank(policy, max_batch_tokens)
    counts = streams_of(rank, seed=1)
    counters = rank.counters.acceptance
    assert 0 < counters.accepted.sum() < counters.scheduled.sum() < counters.proposed.sum()
    assert chi_squared(counts) < LIMIT


class LooksAhead:
    """Appendix A: sends both slots where the second one looks good, none otherwise; judged by x_1 itself."""

    def choose(self, facts: StepFacts) -> VerifyChoice:
        looks_good = facts.survivals[:, 1] > 0.3
        facts.caps[~looks_good] = 0
        return VerifyChoice(facts.survivals.size, 0.0, "looks_ahead")


def test_a_policy_that_looks_ahead_is_found_out() -> None:
    assert chi_squared(streams_of(small_rank(LooksAhead()), seed=1)) > 2 * LIMIT


class OneBlockDrafter(TableDrafter):
    """Proposes one block a stream, right after its first token, and never another."""

    def advance(self, commit: CommitBatch) -> ProposalBatch | None:
        first = commit.committed_lens == 2
        return super().advance(replace(commit, wants_block=commit.wants_block & first))


def test_a_block_that_was_judged_once_is_never_judged_again() -> None:
    """Its tokens are no fresh draws any more: that x_1 was refused says which token it is."""
    line = "table.wants_draft[rounds] = table.has_draft[rounds] = table.is_unasked[rounds] = False"
    reusing = mutant(rank_module, line, line.replace(" = table.has_draft[rounds]", ""))
    for module, is_found_out in ((rank_module, False), (reusing, True)):
        plain = small_rank(LocalPolicy("static_length", static_length=2))
        rank = module.Rank(plain.endpoint, plain.limits, plain.decider)
        # Four tokens: the first comes from the prompt, and a block can be refused and offered again before the last.
        counts = streams_of(rank, seed=3, drafter=OneBlockDrafter(3), num_new=4)
        chi2 = chi_squared(counts)
        assert chi2 > 3 * LIMIT if is_found_out else chi2 < 2 * LIMIT  # 80 degrees of freedom
