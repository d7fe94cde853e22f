"""Many short unseeded streams through a real rank over a target that looks one token back, and their exact law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from actors.core.layout import StepPlan, StepResult
from actors.core.messages import CommitBatch, ProposalBatch, RankProfile
from actors.core.rank import Rank
from actors.core.sampling import SamplingParams
from actors.core.sps import CostCurve
from kernels.rejection import verify, verify_batch
from tests.pure.rank_harness import RANK, Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER

V, GAMMA, NUM_NEW, ANCHOR = 3, 2, 3, 0
P_AFTER = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.45, 0.1, 0.45]])
Q_AFTER = np.array([[0.4, 0.5, 0.1], [0.3, 0.4, 0.3], [0.2, 0.5, 0.3]])
# Confidence of a slot after a token: it tells the token before apart, as the counter-example of appendix A does.
CONFIDENCE_AFTER = np.array([0.8, 0.05, 0.99], np.float32)
NUM_STREAMS = 6000


class TableTarget:
    """Looks one token back; the real acceptance rule. Features of a token are a row of `features` [V, width]."""

    def __init__(self, features: npt.NDArray[np.float32] | None = None) -> None:
        self._features = np.zeros((V, 1), np.float32) if features is None else features

    def step(self, plan: StepPlan) -> StepResult:
        batch = verify_batch(plan)
        logits = torch.from_numpy(np.log(P_AFTER)[plan.token_ids]).float()
        accepted, own = verify(logits[batch.token_rows], batch)
        features = self._features[plan.token_ids]
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
    rank: Rank,
    seed: int,
    drafter: Any = None,
    num_new: int = NUM_NEW,
    target: TableTarget | None = None,
    prompt: tuple[int, ...] = (ANCHOR,),
    num_streams: int = NUM_STREAMS,
) -> npt.NDArray[np.float64]:
    """[V ** num_new] how often each output came after a prompt that ends with ANCHOR."""
    rng = np.random.default_rng(seed)
    own = drafter or TableDrafter(seed)
    session = Session(rank, target=target or TableTarget(), drafter=own)
    counts = np.zeros((V,) * num_new)
    for start in range(0, num_streams, 60):
        for i in range(start, start + 60):
            key = int(rng.integers(0, 2**63))
            message = admitted(str(i), prompt, num_new)
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


def small_rank(
    policy: Any, max_batch_tokens: int = 60, gamma: int = GAMMA, max_running: int = 15
) -> Rank:
    return make_rank(
        policy,
        gamma=gamma,
        vocab_size=V,
        max_running=max_running,
        max_waiting=60,
        max_batch_tokens=max_batch_tokens,
        max_model_len=12,
    )
