"""Requests that walk recorded text, so that a drafter's confidences, and with them where its blocks stop, are real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.messages import CommitBatch
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.trial import RANK
from actors.engine.training.dataset import OnPolicyDataset

TOKENS_A_TURN = 2


@dataclass(frozen=True)
class RecordedRequests:
    """Sampled requests, committing two tokens each turn.

    Args:
        ids: [n] tokens of each; features: [n - 1 or more, feature_dim] of their positions.
        starts: committed tokens before the first turn.
    """

    ids: Sequence[Tensor]
    features: Sequence[Tensor]
    starts: Sequence[int]
    is_recorded: bool = True

    @classmethod
    def of(
        cls, data: OnPolicyDataset, count: int, context_len: int, num_turns: int
    ) -> RecordedRequests | None:
        """`count` requests on the answers of `data`, dealt out in turn; None where none is long enough.

        Each has `context_len` tokens before the first turn, or as many as leave text for `num_turns`; requests on the
        same answer are a few tokens apart.
        """
        ahead = TOKENS_A_TURN * num_turns
        apart = 3 * (count - 1)
        long = [r for r in data.records if r.length > ahead + apart + 2]
        if not long:
            return None
        by_domain: dict[str, int] = {}
        turn_of = []
        for record in long:
            turn_of.append(by_domain.setdefault(record.domain, 0))
            by_domain[record.domain] += 1
        chosen = [long[i] for i in np.argsort(turn_of, kind="stable")[:count]]
        texts = [data.read(record) for record in chosen]
        features = [data.features(text).float() for text in texts]
        starts = [
            min(context_len, record.length - ahead) - 3 * round_
            for round_ in range(-(-count // len(chosen)))
            for record in chosen
        ]
        of = [i % len(chosen) for i in range(count)]
        return cls([texts[i]["ids"] for i in of], [features[i] for i in of], starts[:count])

    @classmethod
    def noise(
        cls, feature_dim: int, count: int, context_len: int, num_turns: int
    ) -> RecordedRequests:
        """Without text: what a draft of whole blocks costs does not depend on what is in it."""
        length = context_len + TOKENS_A_TURN * num_turns + 1
        generator = torch.Generator().manual_seed(0)
        features = torch.randn((count, length, feature_dim), generator=generator)
        ids = torch.ones((count, length), dtype=torch.long)
        return cls(list(ids), list(features), [context_len] * count, is_recorded=False)

    def commits(self, name: str, turn: int, min_survival: float) -> CommitBatch:
        """Turn 0 tells of the contexts, every later one of two tokens more; a block is wanted each time.

        `name` tells apart those that walk the same text in one engine.
        """
        count = len(self.ids)
        committed = np.array(self.starts) + TOKENS_A_TURN * turn
        first = np.zeros_like(committed) if turn == 0 else committed - TOKENS_A_TURN - 1
        own = [slice(a, b - 1) for a, b in zip(first.tolist(), committed.tolist(), strict=True)]
        return CommitBatch(
            rank=RANK,
            step=turn,
            request_ids=tuple(f"{name}-{i}" for i in range(count)),
            generations=np.zeros(count, np.int32),
            committed_lens=committed.astype(np.int32),
            anchor_token_ids=_ints(
                [ids[b - 1] for ids, b in zip(self.ids, committed, strict=True)]
            ),
            wants_block=np.ones(count, bool),
            first_positions=first.astype(np.int32),
            cu_feature_len=np.concatenate([[0], np.cumsum(committed - 1 - first)]).astype(np.int32),
            token_ids=_ints(torch.cat([i[s] for i, s in zip(self.ids, own, strict=True)])),
            features=torch.cat([f[s] for f, s in zip(self.features, own, strict=True)]).numpy(),
            verify_lens=np.zeros(count, np.int32),
            sampling=SamplingBatch.of([SamplingParams(noise_key=i) for i in range(count)]),
            min_survivals=np.full(count, min_survival, np.float32),
        )


def _ints(values: Tensor | Sequence[Tensor]) -> npt.NDArray[np.int32]:
    return np.array([int(value) for value in values], np.int32)
