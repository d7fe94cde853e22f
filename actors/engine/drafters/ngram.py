"""A drafter without a model: what followed the last time the text ended like this (prompt lookup)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.core.messages import CommitBatch, ProposalBatch
from actors.engine.base import DrafterSpec
from actors.engine.drafters.confidence import OnlineConfidence

LONGEST = 4  # tokens of the longest match that is looked for

Int32 = npt.NDArray[np.int32]


@dataclass
class _Text:
    """The committed tokens of one request from position `start` on, and where each short run of them led."""

    start: int
    generation: int
    committed_len: int = 0
    tokens: list[int] = field(default_factory=list)
    # run of 1 .. LONGEST tokens -> index of the token that followed it last
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens; a run counts once the token behind it is known."""
        for token in token_ids:
            known = len(self.tokens)
            for length in range(1, min(LONGEST, known) + 1):
                self.followers[tuple(self.tokens[known - length :])] = known
            self.tokens.append(token)

    def guess(self, count: int) -> tuple[list[int], int]:
        """Return `count` tokens or fewer that may follow, and the length of the match that says so."""
        known = len(self.tokens)
        for length in range(min(LONGEST, known), 0, -1):
            at = self.followers.get(tuple(self.tokens[known - length :]))
            if at is not None:
                found: list[int] = []
                while len(found) < count:  # a match near the end goes on into its own continuation
                    index = at + len(found)
                    found.append(self.tokens[index] if index < known else found[index - known])
                return found, length
        return [], 0


class NgramEngine:
    """Implements `DrafterEngine` (actors.engine.base); needs no features, so the target taps nothing.

    q is one at the proposed token, so every acceptance rule stays exact. Confidences are learned online by the length
    of the match. Without a match the block repeats the anchor with confidence 0: the rank waits for an answer.
    """

    spec: DrafterSpec

    def __init__(self, name: str, gamma: int, draft_top_k: int) -> None:
        """gamma and draft_top_k as in `DrafterSpec`; any gamma serves."""
        self.spec = DrafterSpec(name, gamma, draft_top_k, 0, (), f"ngram-{LONGEST}-{gamma}")
        self.online = OnlineConfidence(gamma, LONGEST + 1)
        self._texts: dict[str, _Text] = {}

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        """Append the tokens, then guess for the rows that want a block (see `DrafterEngine`)."""
        started = time.perf_counter()
        fresh = np.array([i for i in range(len(batch.request_ids)) if self._append(batch, i)], int)
        self.online.learn(batch, fresh)
        wanted = fresh[batch.wants_block[fresh]]
        if not len(wanted):
            return None
        gamma = self.spec.gamma
        blocks: Int32 = np.empty((len(wanted), gamma), np.int32)
        matched = np.zeros((len(wanted), gamma), np.int64)
        for row, i in enumerate(wanted.tolist()):
            guess, length = self._texts[batch.request_ids[i]].guess(gamma)
            blocks[row] = guess or [int(batch.anchor_token_ids[i])] * gamma
            matched[row] = length
        confidences = self.online.propose(batch, wanted, matched)
        confidences[matched == 0] = 0.0
        return self._proposals(batch, wanted, blocks, confidences, started)

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests; unknown ids are fine."""
        for request_id in request_ids:
            self._texts.pop(request_id, None)
        self.online.close(request_ids)

    def open_requests(self) -> tuple[str, ...]:
        """Ids whose text is held."""
        return tuple(self._texts)

    def _append(self, batch: CommitBatch, i: int) -> bool:
        """Take over entry i; whether it says anything new. After a gap the text starts anew."""
        generation, first = int(batch.generations[i]), int(batch.first_positions[i])
        committed = int(batch.committed_lens[i])
        text = self._texts.get(batch.request_ids[i])
        if text is not None and generation < text.generation:
            return False
        if text is None or generation > text.generation:
            text = self._texts[batch.request_ids[i]] = _Text(first, generation)
        if committed <= text.committed_len:
            return False
        own = batch.token_ids[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]].tolist()
        run = [*own, int(batch.anchor_token_ids[i])]  # positions first .. committed - 1
        if first > text.end or first + len(run) != committed:
            text = self._texts[batch.request_ids[i]] = _Text(first, generation)
        text.committed_len = committed
        if first + len(run) != committed:
            return False  # rows are missing before the anchor
        text.extend(run[max(0, text.end - first) :])
        return True

    def _proposals(
        self,
        batch: CommitBatch,
        wanted: npt.NDArray[np.int64],
        blocks: Int32,
        confidences: npt.NDArray[np.float32],
        started: float,
    ) -> ProposalBatch:
        shape = (*blocks.shape, self.spec.draft_top_k)
        q_ids, q_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        q_ids[..., 0], q_probs[..., 0] = blocks, 1.0
        return ProposalBatch(
            drafter=self.spec.name,
            request_ids=tuple(batch.request_ids[i] for i in wanted.tolist()),
            generations=batch.generations[wanted],
            committed_lens=batch.committed_lens[wanted],
            draft_token_ids=blocks,
            confidences=confidences,
            q_ids=q_ids,
            q_probs=q_probs,
            draft_time_s=time.perf_counter() - started,
        )
