"""Who runs in the next step, and the ragged layout of that step.

Rounds come first (a decoding stream is never held up by prefill beyond the chunk that rides in its own step), and a
share of the step is kept for prefill while any prompt is unfinished (so prefill always advances). Everything fits into
`max_batch_tokens`: anchors, draft tokens and prefill chunks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.layout import DraftTokens, SpecialRow, StepPlan
from actors.core.prefill_pace import PrefillPace
from actors.core.request import Request
from actors.core.row_table import Mask, RowTable, Slots

Int32 = npt.NDArray[np.int32]

# Least share of a step that unfinished prompts get when rounds and drafts could fill all of it.
_PREFILL_SHARE = 4


@dataclass(frozen=True)
class StepShape:
    """How the tokens of one step are split before any draft length is known."""

    rounds: Slots  # [R] slots that run a round, earlier arrivals first
    prefill_floor: int  # tokens kept for prompts
    max_prefill: int  # tokens of prompts beside rounds without drafts
    max_draft_tokens: int  # what the step has room for


def shape_step(
    table: RowTable,
    ready: Slots,
    prefilling: Sequence[Request],
    max_batch_tokens: int,
    pace: PrefillPace,
) -> StepShape:
    """Choose the rounds of a step among the `ready` slots and set room aside for prefill.

    When more rounds are ready than fit, those that waited longest run.
    """
    most = pace.most_tokens(len(ready), 0, min(num_prefill_left(prefilling), max_batch_tokens))
    floor = min(most, max(1, max_batch_tokens // _PREFILL_SHARE))
    max_rounds = max_batch_tokens - floor
    if len(ready) > max_rounds:
        oldest_first = np.lexsort((table.arrival[ready], table.last_step[ready]))
        ready = ready[oldest_first[:max_rounds]]
    rounds = ready[np.argsort(table.arrival[ready])]
    most = min(most, max_batch_tokens - len(rounds))
    return StepShape(rounds, floor, most, max_draft_tokens=max_rounds - len(rounds))


def num_prefill_left(prefilling: Sequence[Request]) -> int:
    """Tokens that all of them still have to compute before they can run."""
    return sum(request.num_prefill_left for request in prefilling)


def split_prefill(prefilling: Sequence[Request], num_tokens: int) -> list[tuple[Request, int]]:
    """Cut chunks for at most `num_tokens` tokens, first come first served."""
    chunks: list[tuple[Request, int]] = []
    for request in prefilling:
        chunk_len = min(request.num_prefill_left, num_tokens)
        if chunk_len == 0:
            break
        chunks.append((request, chunk_len))
        num_tokens -= chunk_len
    return chunks


def build_plan(
    step: int,
    table: RowTable,
    block_size: int,
    rounds: Slots,
    verify_len: Int32,
    chunks: Sequence[tuple[Request, int]],
    token_bound: int = 0,
) -> StepPlan:
    """Lay out R rows: the rounds, then the prefill chunks.

    Args:
        rounds: [num_rounds] slots.
        verify_len: [num_rounds] draft tokens each of them sends, at most what its draft holds.
        chunks: requests and how many of their prompt tokens run now.
        token_bound: see `StepPlan.token_bound`.
    """
    slots = np.concatenate((rounds, np.array([request.slot for request, _ in chunks], np.intp)))
    chunk_len = np.array([length for _, length in chunks], np.int32)
    context_len = np.concatenate(
        (
            table.committed_len[rounds] - 1,
            np.array([request.context_len for request, _ in chunks], np.int32),
        )
    )
    query_len = np.concatenate((1 + verify_len, chunk_len)).astype(np.int32)
    cu_query_len = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(query_len, out=cu_query_len[1:])
    row_of_token = np.repeat(np.arange(len(slots)), query_len)
    offset = np.arange(cu_query_len[-1], dtype=np.int32) - cu_query_len[row_of_token]
    positions = context_len[row_of_token] + offset
    last_block = int((context_len + query_len - 1).max() // block_size)
    block_tables = table.block_table[slots, : last_block + 1]
    block_ids = block_tables[row_of_token, positions // block_size]
    no_drafts = np.zeros(len(chunks), np.int32)
    finishes_prompt = [request.num_prefill_left == length for request, length in chunks]
    samples = np.concatenate((np.ones(len(rounds), np.bool_), np.array(finishes_prompt, np.bool_)))
    return StepPlan(
        step=step,
        request_ids=tuple(request_at(table, slot).request_id for slot in slots.tolist()),
        token_ids=_token_ids(table, rounds, verify_len, chunks),
        positions=positions,
        cu_query_len=cu_query_len,
        context_len=context_len,
        block_tables=block_tables,
        slot_mapping=(block_ids * block_size + positions % block_size).astype(np.int32),
        verify_len=np.concatenate((verify_len, no_drafts)).astype(np.int32),
        samples=samples,
        sampling=table.sampling.rows(slots),
        draft=_draft_tokens(table, slots, int(verify_len.max(initial=0))),
        token_bound=token_bound,
        special=_special_rows(table, slots, samples),
    )


def _special_rows(table: RowTable, slots: Slots, samples: Mask) -> tuple[SpecialRow, ...]:
    special = []
    for row in np.flatnonzero(samples & table.is_special[slots]).tolist():
        request = request_at(table, slots[row])
        special.append(
            SpecialRow(
                row,
                request.request_id,
                request.generation,
                request.admitted.sampling,
                request.token_ids[: request.committed_len],
                request.num_output,
                request.admitted.stop_token_ids,
            )
        )
    return tuple(special)


def request_at(table: RowTable, slot: int) -> Request:
    request = table.requests[slot]
    assert request is not None, f"slot {slot} is empty"
    return request


def _token_ids(
    table: RowTable,
    rounds: Slots,
    verify_len: Int32,
    chunks: Sequence[tuple[Request, int]],
) -> Int32:
    """[B] anchors with their drafts, then the prompt chunks."""
    blocks = np.concatenate(
        (table.anchor_token_id[rounds, None], table.draft_token_ids[rounds]), axis=1
    )
    sent = np.arange(blocks.shape[1]) <= verify_len[:, None]
    prompts = [r.token_ids[r.context_len : r.context_len + length] for r, length in chunks]
    return np.concatenate((blocks[sent], *prompts)).astype(np.int32)


def _draft_tokens(table: RowTable, slots: Slots, max_verify_len: int) -> DraftTokens | None:
    """Rows without drafts carry whatever their slot holds: only slots below verify_len are read."""
    if max_verify_len == 0:
        return None
    return DraftTokens(table.q_ids[slots, :max_verify_len], table.q_probs[slots, :max_verify_len])
