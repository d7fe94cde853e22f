"""Token sequences driven through an engine without a rank: for its checks, measurements and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import DraftTokens, StepPlan
from actors.core.sampling import SamplingBatch, SamplingParams

if TYPE_CHECKING:
    from actors.engine.target_engine import TorchTargetEngine

Int = npt.NDArray[np.int64]

GREEDY = SamplingParams(temperature=0.0)


class TrialSequences:
    """Known sequences with disjoint blocks over one engine, advanced in any cut.

    Args:
        engine: its K/V are written.
        token_ids: one array a sequence; its length is the most the sequence can grow to.
        block_order: physical blocks to deal out; all of the engine's, in order, when None.
    """

    def __init__(
        self,
        engine: TorchTargetEngine,
        token_ids: Sequence[Int],
        block_order: Int | None = None,
    ) -> None:
        self.engine, self.token_ids = engine, token_ids
        self.length = np.zeros(len(token_ids), np.int64)
        longest = max(len(ids) for ids in token_ids)
        per_row = -(-longest // engine.store.block_size)
        order = np.arange(engine.store.num_blocks) if block_order is None else block_order
        assert per_row * len(token_ids) <= len(order), "the engine has too few blocks"
        # Dealt in turn, so that a row's blocks are not neighbours.
        dealt = order[: per_row * len(token_ids)].reshape(per_row, -1)
        self.block_tables = np.ascontiguousarray(dealt.T).astype(np.int32)

    def plan(
        self,
        query_len: dict[int, int],
        *,
        rounds: bool = False,
        sampling: Sequence[SamplingParams] | None = None,
        draft_top_k: int = 1,
    ) -> StepPlan:
        """The next `query_len[row]` tokens of these rows: as chunks of prompt, or as an anchor and its drafts.

        Drafts count as drawn with certainty, over a support of `draft_top_k` ids.
        """
        rows = np.fromiter(query_len, np.int64)
        counts = np.fromiter(query_len.values(), np.int64)
        starts = self.length[rows]
        spans = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        size = self.engine.store.block_size
        slots = [
            self.block_tables[r, span // size] * size + span % size
            for r, span in zip(rows, spans, strict=True)
        ]
        tokens = [self.token_ids[r][span] for r, span in zip(rows, spans, strict=True)]
        self.length[rows] += counts
        verify_len = counts - 1 if rounds else np.zeros_like(counts)
        return StepPlan(
            step=0,
            request_ids=tuple(str(row) for row in rows),
            token_ids=np.concatenate(tokens).astype(np.int32),
            positions=np.concatenate(spans).astype(np.int32),
            cu_query_len=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_len=starts.astype(np.int32),
            block_tables=self.block_tables[rows],
            slot_mapping=np.concatenate(slots).astype(np.int32),
            verify_len=verify_len.astype(np.int32),
            samples=np.full(len(rows), True),
            sampling=SamplingBatch.of(list(sampling or [GREEDY] * len(rows))),
            draft=_certain_drafts(tokens, verify_len, draft_top_k) if verify_len.any() else None,
            token_bound=int(counts.sum()) if rounds else 0,
        )

    def logits(self, query_len: dict[int, int]) -> list[Tensor]:
        """Advance; each row's logits [query_len, vocab_size]."""
        with torch.inference_mode():
            found = self.engine.all_logits(self.plan(query_len))
        return list(found.split(list(query_len.values())))


def prefilled(
    engine: TorchTargetEngine, num_requests: int, context: int, room: int
) -> TrialSequences:
    """Requests of random tokens whose first `context` are computed: once, then copied to each one's own blocks."""
    ids = np.random.default_rng(0).integers(
        0, engine.spec.vocab_size, (num_requests, context + room)
    )
    ids[:, :context] = ids[0, :context]
    per_row = -(-ids.shape[1] // engine.store.block_size)
    # Where K/V are kept contiguous too (`kernels.row_mirror`), padded: room as in a pool of which not everything runs.
    room_for = 2 if engine.mirrors else 1
    rows = TrialSequences(engine.sibling(room_for * per_row * num_requests), list(ids))
    rows.engine.step(rows.plan({0: context}))
    for row in range(1, num_requests):
        rows.engine.store.copy_blocks(rows.block_tables[0], rows.block_tables[row])
    rows.length[:] = context
    return rows


def _certain_drafts(tokens: Sequence[Int], verify_len: Int, draft_top_k: int) -> DraftTokens:
    shape = (len(tokens), int(verify_len.max()), draft_top_k)
    q_ids, q_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, (ids, count) in enumerate(zip(tokens, verify_len, strict=True)):
        q_ids[row, :count, 0] = ids[1 : count + 1]
        q_probs[row, :count, 0] = 1.0
    return DraftTokens(q_ids, q_probs)
