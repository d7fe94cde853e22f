"""What a drafter is told of the rows of a step: what the step committed, and what their contexts lack before that.

A context lacks its beginning when the prompt was found in the prefix cache, and all of it when the drafter is new (it
was restarted, or takes over from one that died). The features of those tokens lie in the cache; they are sent in
pieces of bounded size, each stamped like a chunk of prefill, and a block is asked for once the context is whole.

Who gets no block need not be told of every token: what a step costs a drafter hardly depends on its tokens, and on a
CPU the drafter takes that time from the target. So such rows are told of many tokens at once, from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.layout import StepPlan
from actors.core.prefix_cache import Features, PrefixCache
from actors.core.request import Request
from actors.core.row_table import Mask, RowTable, Slots

Int32 = npt.NDArray[np.int32]

MOST_HELD_BACK = 256  # tokens a row may have to catch up with before its next block
MOST_SILENT_S = 60.0  # of a row; a drafter gives up contexts nobody speaks of for five minutes
_MOST_CAUGHT_UP_BYTES = 64 * 2**20  # of features in one message, beyond those of its own step


@dataclass(frozen=True)
class DraftFeed:
    """The fields of a `CommitBatch` about tokens, for N requests; `is_whole`: their contexts reach their anchors."""

    is_whole: Mask  # [N]
    committed_lens: Int32  # [N]
    anchor_token_ids: Int32  # [N]
    first_positions: Int32  # [N]
    cu_feature_len: Int32  # [N + 1]
    token_ids: Int32  # [sum]
    features: Features  # [sum, feature_dim]


def held_back(
    plan: StepPlan,
    slots: Slots,
    num_kept: Int32,
    asks: Mask,
    table: RowTable,
    cache: PrefixCache,
    now: float,
) -> Mask:
    """[R] rows of a step that no drafter needs to hear of yet: they get no block and their contexts lack little.

    Never a row whose drafts were just verified (drafters without a confidence head learn from what became of them),
    nor without a cache, where the features of a step are gone with it.

    Args:
        slots, num_kept: [R] of each plan row; see `feed_of`.
        asks: [num_slots] who gets a block.
    """
    lacking = table.committed_len[slots] - 1 - table.draft_len[slots]
    needless = table.is_running[slots] & ~asks[slots] & (plan.verify_len == 0)
    has_drafter = (num_kept > 0) & (table.drafter_index[slots] >= 0)
    is_recent = now - table.told_at[slots] < MOST_SILENT_S
    held: Mask = needless & has_drafter & (lacking < MOST_HELD_BACK) & is_recent
    return held & cache.enabled


def feed_of(
    plan: StepPlan,
    features: Features,
    rows: Sequence[Request],
    num_kept: Int32,
    table: RowTable,
    cache: PrefixCache,
) -> DraftFeed:
    """What to tell one drafter after a step, and note in the table that it was told.

    Args:
        num_kept: [R] leading tokens of each plan row that this drafter hears of; 0: the row is none of its.
    """
    chosen = np.flatnonzero(num_kept)
    slots = np.array([rows[row].slot for row in chosen.tolist()], np.intp)
    first = np.minimum(table.draft_len[slots], plan.context_len[chosen])
    lacks: Mask = first < plan.context_len[chosen]
    if cache.enabled and lacks.any():
        requests = [rows[row] for row in chosen.tolist()]
        feed = _with_earlier(slots, requests, first, lacks, table, cache)
    else:
        feed = _of_step(plan, features, chosen, slots, num_kept, table)
    table.draft_len[slots] = feed.committed_lens - 1
    return feed


def _of_step(
    plan: StepPlan,
    features: Features,
    chosen: npt.NDArray[np.intp],
    slots: npt.NDArray[np.intp],
    num_kept: Int32,
    table: RowTable,
) -> DraftFeed:
    row_of_token = np.repeat(np.arange(plan.num_requests), np.diff(plan.cu_query_len))
    offset = np.arange(plan.batch_tokens) - plan.cu_query_len[row_of_token]
    is_kept = offset < num_kept[row_of_token]
    return DraftFeed(
        np.ones(len(chosen), np.bool_),
        table.committed_len[slots],
        table.anchor_token_id[slots],
        plan.context_len[chosen],
        _cumulated(num_kept[chosen]),
        plan.token_ids[is_kept],
        features[is_kept],
    )


def _with_earlier(
    slots: npt.NDArray[np.intp],
    requests: Sequence[Request],
    first: Int32,
    lacks: Mask,
    table: RowTable,
    cache: PrefixCache,
) -> DraftFeed:
    """Every row from `first` on, where its context ends; those that lack something in bounded pieces."""
    row_bytes = max(1, cache.features_of(np.zeros(1, np.intp)).nbytes)
    most = max(1, _MOST_CAUGHT_UP_BYTES // row_bytes // int(lacks.sum()))
    whole_end = table.committed_len[slots] - 1
    end: Int32 = np.where(lacks, np.minimum(whole_end, first + most), whole_end)
    tokens, kv_slots = [], []
    for slot, request, start, stop in zip(
        slots.tolist(), requests, first.tolist(), end.tolist(), strict=True
    ):
        positions = np.arange(start, stop)
        tokens.append(request.token_ids[start:stop])
        block_size = request.lease.block_size
        blocks = table.block_table[slot, positions // block_size]
        kv_slots.append(blocks * block_size + positions % block_size)
    anchors = [
        request.token_ids[stop] for request, stop in zip(requests, end.tolist(), strict=True)
    ]
    return DraftFeed(
        end == whole_end,
        end + 1,
        np.array(anchors, np.int32),
        first,
        _cumulated(end - first),
        np.concatenate(tokens),
        cache.features_of(np.concatenate(kv_slots)),
    )


def _cumulated(lengths: Int32) -> Int32:
    cumulated = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cumulated[1:])
    return cumulated
