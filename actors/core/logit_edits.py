"""Logit rules as a sparse list of changes to the rows of logits that a step decides with. Formulas, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.layout import SpecialRow, StepPlan
from actors.core.logit_rules import LogitRules

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LogitEdits:
    """logit ← scale(logit, factor) + addend, where scale divides positive logits and multiplies others.

    Every (row, token) comes once, so that the result does not depend on an order.
    """

    rows: Int64  # [E] among the logits the step decides with
    token_ids: Int64  # [E]
    factors: Float32  # [E] 1 changes nothing
    addends: Float32  # [E] -inf forbids


def first_decided_rows(plan: StepPlan) -> Int64:
    """[R] for each row of the plan, the first of its 1 + verify_len rows among the logits the step decides with."""
    decided = np.where(plan.samples, plan.verify_len.astype(np.int64) + 1, 0)
    return np.cumsum(decided) - decided


def drafts_of(plan: StepPlan, row: int) -> npt.NDArray[np.int32]:
    """The draft tokens that a row of the plan verifies, [verify_len]."""
    end = int(plan.cu_query_len[row + 1])
    return plan.token_ids[end - int(plan.verify_len[row]) : end]


def logit_edits(plan: StepPlan) -> LogitEdits | None:
    """The edits of a step; None when no row has any."""
    firsts = first_decided_rows(plan)
    parts = [
        _row_edits(special, special.sampling.rules, drafts_of(plan, special.row), firsts)
        for special in plan.special
        if special.sampling.rules is not None
    ]
    filled = [part for part in parts if len(part.rows)]
    if not filled:
        return None
    return LogitEdits(
        np.concatenate([part.rows for part in filled]),
        np.concatenate([part.token_ids for part in filled]),
        np.concatenate([part.factors for part in filled]),
        np.concatenate([part.addends for part in filled]),
    )


def _row_edits(
    special: SpecialRow, rules: LogitRules, drafts: npt.NDArray[np.int32], firsts: Int64
) -> LogitEdits:
    """Edits of the 1 + verify_len positions of one row: position k counts the drafts before it as output."""
    output = special.token_ids[len(special.token_ids) - special.num_output :]
    repeats = rules.repetition_penalty != 1.0
    before = special.token_ids if repeats else output if rules.counts_output else output[:0]
    counted = drafts if repeats or rules.counts_output else drafts[:0]
    bias_ids = np.array([token_id for token_id, _ in rules.logit_bias], np.int64)
    num_positions = 1 + len(drafts)
    num_banned = min(max(0, rules.min_tokens - special.num_output), num_positions)
    banned = np.array(special.stop_token_ids if num_banned else (), np.int64)
    ids = np.unique(np.concatenate((before, counted, bias_ids, banned)).astype(np.int64))
    # [positions, ids]: how often an id was drafted before a position, on top of what came before all of them.
    steps = np.zeros((num_positions, len(ids)), np.int64)
    if len(counted):
        steps[np.arange(1, num_positions), np.searchsorted(ids, counted)] = 1
    drafted = steps.cumsum(axis=0)
    counts = _counts(ids, output if rules.counts_output else output[:0]) + drafted
    addends = np.zeros(counts.shape, np.float64)
    if rules.counts_output:
        addends -= rules.frequency_penalty * counts + rules.presence_penalty * (counts > 0)
    addends[:, np.searchsorted(ids, bias_ids)] += np.array([b for _, b in rules.logit_bias])
    addends[:num_banned, np.searchsorted(ids, banned)] = -np.inf
    factors = np.ones(counts.shape, np.float64)
    if repeats:
        factors[_counts(ids, before) + drafted > 0] = rules.repetition_penalty
    position, column = np.nonzero((addends != 0.0) | (factors != 1.0))
    return LogitEdits(
        int(firsts[special.row]) + position.astype(np.int64),
        ids[column],
        factors[position, column].astype(np.float32),
        addends[position, column].astype(np.float32),
    )


def _counts(ids: Int64, tokens: npt.NDArray[np.int32]) -> Int64:
    """How often each of the sorted `ids` is among `tokens`; those outside are left out."""
    found, times = np.unique(tokens, return_counts=True)
    counts = np.zeros(len(ids), np.int64)
    counts[np.searchsorted(ids, found)] = times
    return counts
