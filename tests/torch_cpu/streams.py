"""Whole streams of many requests through the real sampling and acceptance, with keyed draws, on a tiny vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import DraftTokens, StepPlan
from actors.core.sampling import SamplingBatch
from kernels import block_reference
from kernels.block_reference import BlockSample, DraftSampling, MarkovHead
from kernels.rejection import verify, verify_batch

Int64 = npt.NDArray[np.int64]
Lengths = Callable[[int, BlockSample], Int64]
"""(round, the blocks drafted in it) to verify_len [R]."""


@dataclass(frozen=True)
class TinyModels:
    target: Tensor  # [V, V] logits after a token
    base: Tensor  # [gamma, V] base logits of the drafter
    markov: MarkovHead
    draft_top_k: int

    @classmethod
    def random(cls, seed: int, gamma: int, vocab: int, draft_top_k: int) -> TinyModels:
        rng = torch.Generator().manual_seed(seed)
        head = MarkovHead(
            torch.randn(vocab, 2, generator=rng), torch.randn(vocab, 2, generator=rng)
        )
        target, base = (
            torch.randn(vocab, vocab, generator=rng),
            torch.randn(gamma, vocab, generator=rng),
        )
        return cls(target, base, head, draft_top_k)

    @property
    def gamma(self) -> int:
        return len(self.base)

    def without(self, slots: int) -> TinyModels:
        """The same models with shorter blocks."""
        return replace(self, base=self.base[: self.gamma - slots])


def generate(
    models: TinyModels,
    sampling: SamplingBatch,
    lengths: Lengths,
    num_tokens: int,
    anchors: Int64 | None = None,
    start: int = 3,
    sample_block: Callable[..., BlockSample] = block_reference.sample_block,
) -> Int64:
    """The next `num_tokens` tokens of R streams, [R, num_tokens]; row r follows `anchors[r]` at position `start`."""
    num_rows = len(sampling.rule)
    last = np.zeros(num_rows, np.int64) if anchors is None else anchors.copy()
    position = np.full(num_rows, start)
    room = num_tokens + models.gamma + 1
    out = np.full((num_rows, room), -1)
    round_index = 0
    while (position - start).min() < num_tokens:
        block = sample_block(
            models.base[None].expand(num_rows, -1, -1),
            models.markov,
            torch.from_numpy(last),
            torch.from_numpy(position),
            DraftSampling.of(sampling),
            models.draft_top_k,
        )
        done = position - start >= num_tokens
        lens = np.where(done, 0, lengths(round_index, block))
        plan = _plan(last, position, lens, block, sampling)
        logits = models.target[plan.token_ids.astype(np.int64)]
        accepted, token = (each.numpy() for each in verify(logits, verify_batch(plan)))
        slots = np.arange(models.gamma + 1)
        run = np.concatenate([block.draft_token_ids.numpy(), np.full((num_rows, 1), -1)], axis=1)
        run[np.arange(num_rows), accepted] = token
        kept = (slots <= accepted[:, None]) & ~done[:, None]
        rows, slot = np.nonzero(kept)
        out[rows, position[rows] - start + slot] = run[rows, slot]
        position = position + np.where(done, 0, accepted + 1)
        last = np.where(done, last, token)
        round_index += 1
    return out[:, :num_tokens]


def _plan(
    last: Int64, position: Int64, lens: Int64, block: BlockSample, sampling: SamplingBatch
) -> StepPlan:
    num_rows, gamma = len(last), block.draft_token_ids.shape[1]
    slots = np.arange(gamma + 1)
    used = slots <= lens[:, None]
    tokens = np.concatenate([last[:, None], block.draft_token_ids.numpy()], axis=1)
    return StepPlan(
        step=0,
        request_ids=("r",) * num_rows,
        token_ids=tokens[used].astype(np.int32),
        positions=(position[:, None] + slots)[used].astype(np.int32),
        cu_query_len=np.concatenate([[0], np.cumsum(lens + 1)]).astype(np.int32),
        context_len=position.astype(np.int32),
        block_tables=np.zeros((num_rows, 1), np.int32),
        slot_mapping=np.zeros(int(used.sum()), np.int32),
        verify_len=lens.astype(np.int32),
        samples=np.ones(num_rows, np.bool_),
        sampling=sampling,
        draft=DraftTokens(block.q_ids.numpy().astype(np.int32), block.q_probs.numpy()),
    )


def always(length: int) -> Lengths:
    return lambda _, block: np.full(len(block.draft_token_ids), length)


def at_random(seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    return lambda _, block: rng.integers(
        0, block.draft_token_ids.shape[1] + 1, len(block.draft_token_ids)
    )
