"""Scripted engines for tests of the shells: no weights, no torch, and a stream that can be computed in one's head.

The token after `token` at position `p` is `following(token, p)`, whatever else happens. The drafter proposes the true
tokens in its first `NUM_RIGHT` slots and wrong ones behind, so every round of a full block commits NUM_RIGHT + 1.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from actors.core.layout import StepPlan, StepResult
from actors.core.lockstep import StepLayout
from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.own_profile import StepTimes
from actors.engine.base import DrafterSpec, TargetEngine, TargetSpec
from actors.peers import Seat
from configs.schema import ClusterConfig

VOCAB = 997
EOS = VOCAB  # never produced
NUM_IDS = 50_000  # prompts may hold ids of a real tokenizer
HANG = 996  # a token that no step with it survives
GAMMA, NUM_RIGHT, TOP_K = 5, 3, 4
STEP_S, DRAFT_S, PACED_STEP_S = 0.004, 0.001, 0.03


def following(token: int, position: int) -> int:
    return (token * 31 + position * 7 + 1) % (VOCAB - 1)


def stream_after(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(following(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class FakeTarget:
    def __init__(self, config: ClusterConfig, seat: Seat) -> None:
        target = config.target
        self.spec = TargetSpec(
            name=config.model.name,
            architecture="fake",
            vocab_size=NUM_IDS,
            hidden_size=2,
            num_layers=1,
            max_model_len=config.model.max_model_len,
            eos_token_ids=(EOS,),
            tap_layer_ids=(0,),
            dtype="float32",
            device="cpu",
            numerics="reproducible",
            num_blocks=target.kv_cache_tokens // target.block_size,
            block_size=target.block_size,
            identity=f"fake-{seat.num_threads}",
        )

    def check_row_invariance(self) -> bool:
        return True

    def step(self, plan: StepPlan) -> StepResult:
        time.sleep(3600 if HANG in plan.token_ids else STEP_S)
        num_accepted = np.zeros(plan.num_requests, np.int32)
        next_token = np.full(plan.num_requests, -1, np.int32)
        for row in range(plan.num_requests):
            first, end = plan.cu_query_len[row : row + 2]
            tokens, positions = plan.token_ids[first:end], plan.positions[first:end]
            verify_len = int(plan.verify_len[row])
            at = len(tokens) - 1 - verify_len
            while num_accepted[row] < verify_len and tokens[at + 1] == following(
                int(tokens[at]), int(positions[at])
            ):
                at += 1
                num_accepted[row] += 1
            if plan.samples[row]:
                next_token[row] = following(int(tokens[at]), int(positions[at]))
        features = np.stack([plan.positions, plan.token_ids], 1).astype(np.float32)
        return StepResult(num_accepted, next_token, features)


class FakeGroupTarget(FakeTarget):
    """Steps together with the others over a real process group, though it has no experts to share."""

    num_uncaptured = 0

    def __init__(self, config: ClusterConfig, seat: Seat) -> None:
        from actors.engine.expert_group import ExpertGroup

        super().__init__(config, seat)
        size = config.target.group_size
        self.group = ExpertGroup(seat.rank % size, size)

    def step(self, plan: StepPlan) -> StepResult:
        self.group.agree(plan.batch_tokens)
        return super().step(plan)

    def join(self, *, is_leaving: bool = False) -> StepLayout:
        return self.group.agree(0, is_leaving=is_leaving)


def paced_target(config: ClusterConfig, seat: Seat) -> TargetEngine:
    """A real engine whose steps take at least `PACED_STEP_S`: a stream of a tiny model can be watched."""
    from cluster.parts import target_engine

    engine = target_engine(config, seat)
    compute = engine.step

    def paced(plan: StepPlan) -> StepResult:
        time.sleep(PACED_STEP_S)
        return compute(plan)

    engine.step = paced  # type: ignore[method-assign]
    return engine


class FakeDrafter:
    """Also checks that the features it gets are those of the positions it is told."""

    def __init__(self, config: ClusterConfig, seat: Seat) -> None:
        self.spec = DrafterSpec(seat.name, GAMMA, TOP_K, 2, (0,), "fake")
        self._held: dict[str, int] = {}

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        time.sleep(DRAFT_S)
        for i, request_id in enumerate(batch.request_ids):
            first = int(batch.first_positions[i])
            rows = batch.features[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]]
            if not request_id.startswith("profile"):
                assert (rows[:, 0] == np.arange(first, first + len(rows))).all(), request_id
                assert first + len(rows) == batch.committed_lens[i] - 1, request_id
            self._held[request_id] = int(batch.committed_lens[i])
        wanted = np.flatnonzero(batch.wants_block)
        return self._draft(batch, wanted) if len(wanted) else None

    def _draft(self, batch: CommitBatch, wanted: Any) -> ProposalBatch:
        drafts = np.zeros((len(wanted), GAMMA), np.int32)
        for row, i in enumerate(wanted):
            token, position = int(batch.anchor_token_ids[i]), int(batch.committed_lens[i]) - 1
            for k in range(GAMMA):
                token = following(token, position + k)
                drafts[row, k] = token if k < NUM_RIGHT else (token + 1) % (VOCAB - 1)
        q_ids = np.full((*drafts.shape, TOP_K), -1, np.int32)
        q_ids[..., 0] = drafts
        q_probs = np.zeros(q_ids.shape, np.float32)
        q_probs[..., 0] = 1
        confidences = np.full(drafts.shape, 0.95, np.float32)
        confidences[:, NUM_RIGHT:] = 0.02
        return ProposalBatch(
            drafter=self.spec.name,
            request_ids=tuple(batch.request_ids[i] for i in wanted),
            generations=batch.generations[wanted],
            committed_lens=batch.committed_lens[wanted],
            draft_token_ids=drafts,
            confidences=confidences,
            q_ids=q_ids,
            q_probs=q_probs,
            draft_time_s=DRAFT_S,
        )

    def close(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def open_requests(self) -> tuple[str, ...]:
        return tuple(self._held)


def fake_step_times(engine: Any, config: ClusterConfig) -> StepTimes:
    """A step costs a constant and a little for each token."""
    batch_tokens = np.array([1, 2, 4, 8, 16, 32, 64], np.int32)
    return StepTimes(batch_tokens, np.minimum(batch_tokens, 16), STEP_S + 1e-5 * batch_tokens)
