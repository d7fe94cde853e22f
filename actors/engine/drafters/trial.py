"""A commit for requests that are all alike: what the cost of a draft is measured with."""

from __future__ import annotations

from typing import Any

import numpy as np

from actors.core.messages import CommitBatch, Endpoint
from actors.core.sampling import SamplingBatch

RANK = Endpoint("measure", "target", "", "", "")


def trial_commit(
    names: tuple[str, ...],
    first_position: int,
    committed_len: int,
    features: np.ndarray[Any, Any],
    sampling: SamplingBatch,
    min_survival: float = 0.0,
) -> CommitBatch:
    """Commit the same number of tokens of N requests and ask for a block of each.

    Args:
        features: [N * rows, feature_dim] of the rows = committed_len - 1 - first_position new positions of each.
        sampling: of all N.
        min_survival: where each block may stop; 0: whole blocks.
    """
    n, rows = len(names), committed_len - 1 - first_position
    return CommitBatch(
        rank=RANK,
        step=0,
        request_ids=names,
        generations=np.zeros(n, np.int32),
        committed_lens=np.full(n, committed_len, np.int32),
        anchor_token_ids=np.ones(n, np.int32),
        wants_block=np.ones(n, bool),
        first_positions=np.full(n, first_position, np.int32),
        cu_feature_len=np.arange(0, n * rows + 1, rows, dtype=np.int32),
        token_ids=np.ones(n * rows, np.int32),
        features=features,
        verify_lens=np.zeros(n, np.int32),
        sampling=sampling,
        min_survivals=np.full(n, min_survival, np.float32),
    )
