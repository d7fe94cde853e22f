"""What serving engines with a draft context share: taking in a commit, forgetting requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from actors.core.messages import CommitBatch
from actors.engine.base import DrafterSpec
from actors.engine.drafters.confidence import OnlineConfidence
from actors.engine.drafters.context import Append, ContextStore
from actors.engine.drafters.protocol import commit_features

Int64 = npt.NDArray[np.int64]


class ContextEngine:
    """The half of a `DrafterEngine` (actors.engine.base) that keeps contexts. Subclasses set the attributes."""

    spec: DrafterSpec
    context: ContextStore
    online: OnlineConfidence  # used where there is no confidence head

    def take(self, batch: CommitBatch) -> tuple[Tensor, Int64, Append, npt.NDArray[np.bool_]]:
        """Learn from a commit and place what it brings; the caller writes the K/V.

        Returns the features [T, feature_dim], the context row of each entry, where new features go, and which entries
        can be drafted for: news, asked for, and with the whole context up to the anchor.
        Raises ValueError when the features are not `feature_dim` wide.
        """
        features = commit_features(batch, self.spec)
        rows = self.context.rows_of(batch.request_ids)
        committed = batch.committed_lens.astype(np.int64)
        is_fresh = self.context.accept(rows, batch.generations.astype(np.int64), committed)
        fresh = np.flatnonzero(is_fresh)
        self.online.learn(batch, fresh)
        first, cu_len = (
            batch.first_positions.astype(np.int64),
            batch.cu_feature_len.astype(np.int64),
        )
        place = self.context.plan_append(rows, first, cu_len, fresh)
        is_whole = self.context.lengths[rows] == committed - 1
        return features, rows, place, is_fresh & batch.wants_block & is_whole

    def close(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests; unknown ids are fine."""
        self.context.close(request_ids)
        self.online.close(request_ids)

    def open_requests(self) -> tuple[str, ...]:
        """Ids whose context is held."""
        return self.context.request_ids
