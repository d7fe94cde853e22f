"""Whether a loaded model gives a row the same bits whatever is computed beside it, found by trying."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from actors.engine.trial import Int, TrialSequences

if TYPE_CHECKING:
    from actors.engine.target_engine import TorchTargetEngine

CHECKED_TOKENS = 6  # a verification round of gamma = 5
CONTEXTS = (
    21,
    21,
    90,
    90,
    60,
    90,
    60,
    300,
)  # the last one is long enough for sums over keys to be split
QUERIES = (CHECKED_TOKENS, 1, 2, 3, 1, 4, 1, CHECKED_TOKENS)
COMPARED_ROWS = (0, 1, 7)
# A row beside one long enough for every kernel to cut sums over keys into parts.
LONG_CONTEXTS, LONG_QUERIES = (600, 1040), (CHECKED_TOKENS, 1)


def rows_are_invariant(engine: TorchTargetEngine) -> bool:
    """Compare, bitwise, the logits of the same tokens computed one by one, as one query, within one long prefill, and
    in a batch with shorter and longer neighbours: eight short rows, then two long ones."""
    return _are_invariant(engine, CONTEXTS, QUERIES, COMPARED_ROWS) and _are_invariant(
        engine, LONG_CONTEXTS, LONG_QUERIES, (0,)
    )


def _are_invariant(
    engine: TorchTargetEngine,
    wanted_contexts: tuple[int, ...],
    queries: tuple[int, ...],
    compared_rows: tuple[int, ...],
) -> bool:
    limit = engine.spec.max_model_len - CHECKED_TOKENS
    contexts = [min(limit, context) for context in wanted_contexts]
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, engine.spec.vocab_size, n + CHECKED_TOKENS) for n in contexts]
    blocks = len(ids) * -(-max(len(i) for i in ids) // engine.store.block_size)
    beside = TrialSequences(engine.sibling(blocks), ids)
    beside.logits({row: n for row, n in enumerate(contexts) if row})
    beside.logits({0: contexts[0]})
    together = beside.logits(dict(enumerate(queries)))
    return all(
        torch.equal(together[row], want[: len(together[row])])
        for row in compared_rows
        for want in _alone(engine, ids[row])
    )


def _alone(engine: TorchTargetEngine, ids: Int) -> list[Tensor]:
    """Logits of the last CHECKED_TOKENS tokens: one by one after two chunks, and within one prefill."""
    blocks = -(-len(ids) // engine.store.block_size)
    context = len(ids) - CHECKED_TOKENS
    stepwise, at_once = (TrialSequences(engine.sibling(blocks), [ids]) for _ in range(2))
    first_chunk = context // 3
    stepwise.logits({0: first_chunk})
    stepwise.logits({0: context - first_chunk})
    one_by_one = torch.cat([stepwise.logits({0: 1})[0] for _ in range(CHECKED_TOKENS)])
    return [one_by_one, at_once.logits({0: len(ids)})[0][context:]]
