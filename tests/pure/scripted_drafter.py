"""The fixed token function behind the rank tests, and a drafter that knows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.core.draft_stop import LEAST_DRAFTED
from actors.core.messages import CommitBatch, Endpoint, ProposalBatch

VOCAB = 50


def endpoint(name: str, role: str, epoch: str = "1") -> Endpoint:
    return Endpoint(name, role, f"inproc://{name}", "", epoch)  # type: ignore[arg-type]


RANK = endpoint("target-0", "target")
INGRESS = endpoint("ingress-0", "ingress")
DRAFTER = endpoint("drafter-0", "drafter")
ALLOCATOR = endpoint("allocator", "allocator")


def true_token(prefix: Sequence[int]) -> int:
    state = 7
    for token in prefix:
        state = (state * 1000003 + token + 1) & 0xFFFFFFFF
    return (state >> 7) % VOCAB


def oracle(
    prompt: Sequence[int], max_new: int, stops: Sequence[int] = (), num_prior: int = 0
) -> tuple[list[int], str]:
    """What plain decoding emits after `prompt`, whose last `num_prior` tokens are output already."""
    tokens, out = list(prompt), []
    while len(out) + num_prior < max_new:
        token = true_token(tokens)
        tokens.append(token)
        out.append(token)
        if token in stops:
            return out, "stop"
    return out, "length"


@dataclass
class Context:
    generation: int
    start: int
    tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ScriptedDrafter:
    """Drafts true tokens, each wrong with probability `error`; keeps the contexts it was fed."""

    def __init__(self, me: Endpoint, gamma: int, error: float, rng: random.Random) -> None:
        self.me, self.gamma, self.error, self.rng = me, gamma, error, rng
        self.contexts: dict[str, Context] = {}

    def close(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            self.contexts.pop(request_id, None)

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        wanted: list[int] = []
        blocks: list[list[int]] = []
        assert batch.cu_feature_len[-1] == len(batch.features)
        for i, request_id in enumerate(batch.request_ids):
            first = int(batch.first_positions[i])
            rows = batch.features[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]]
            assert rows[:, 0].tolist() == list(range(first, first + len(rows)))
            context = self.contexts.get(request_id)
            if context is None or context.generation != batch.generations[i]:
                context = self.contexts[request_id] = Context(int(batch.generations[i]), first)
            assert first == context.end, "the features leave a hole or repeat"
            own = batch.token_ids[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]]
            assert own.tolist() == rows[:, 1].tolist(), "tokens and features of different rows"
            context.tokens += [int(token) for token in rows[:, 1]]
            assert context.end == batch.committed_lens[i] - 1, "the context must end at the anchor"
            if batch.wants_block[i]:
                wanted.append(i)
                blocks.append(self._block(context, int(batch.anchor_token_ids[i])))
        if not wanted:
            return None
        count = len(wanted)
        draft = np.array(blocks, np.int32).reshape(count, self.gamma)
        confidences = np.array(
            [[self.rng.random() for _ in range(self.gamma)] for _ in wanted], np.float32
        )
        q_ids = np.full((count, self.gamma, 2), -1, np.int32)
        stops = batch.min_survivals[wanted]
        goes_on = np.arange(self.gamma) < LEAST_DRAFTED
        goes_on = np.logical_and.accumulate(
            goes_on | (confidences.cumprod(axis=1) >= stops[:, None]), axis=1
        )
        confidences[~goes_on] = 0.0
        fillers = np.broadcast_to(batch.anchor_token_ids[wanted][:, None], draft.shape)
        draft = np.where(goes_on, draft, fillers).astype(np.int32)
        q_ids[:, :, 0] = draft
        q_probs = np.zeros((count, self.gamma, 2), np.float32)
        q_probs[:, :, 0] = 1.0
        return ProposalBatch(
            self.me.name,
            tuple(batch.request_ids[i] for i in wanted),
            batch.generations[wanted],
            batch.committed_lens[wanted],
            draft,
            confidences,
            q_ids,
            q_probs,
            0.001,
            goes_on.sum(axis=1).astype(np.int32),
        )

    def _block(self, context: Context, anchor: int) -> list[int]:
        prefix, block = [*context.tokens, anchor], []
        for _ in range(self.gamma):
            token = true_token(prefix) if context.start == 0 else self.rng.randrange(VOCAB)
            if self.rng.random() < self.error:
                token = (token + 1) % VOCAB
            prefix.append(token)
            block.append(token)
        return block
