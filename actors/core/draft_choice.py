"""Whom a rank asks for a block: while drafting pays, all that can use one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.core.batching import num_prefill_left
from actors.core.prefill_pace import PrefillPace
from actors.core.rank_counters import RankCounters
from actors.core.request import Request
from actors.core.row_table import Mask, RowTable, Slots
from actors.core.verify_decision import DraftFacts, VerifyDecider


def choose_drafting(
    step: int,
    table: RowTable,
    askable: Slots,
    prefilling: Sequence[Request],
    max_batch_tokens: int,
    pace: PrefillPace,
    decider: VerifyDecider,
    counters: RankCounters,
) -> Mask:
    """Which slots [S] of the `askable` ones are asked for a block for the next step."""
    asked: Mask = np.zeros(table.num_slots, np.bool_)
    if len(askable):
        facts = draft_facts(step, table, len(askable), prefilling, max_batch_tokens, pace)
        choice = decider.choose_drafting(facts)
        asked[askable] = choice.asks
        counters.count_drafting(choice)
    return asked


def draft_facts(
    step: int,
    table: RowTable,
    num_askable: int,
    prefilling: Sequence[Request],
    max_batch_tokens: int,
    pace: PrefillPace,
) -> DraftFacts:
    """What the step to come looks like before any block of it exists."""
    num_rounds = int(table.is_running.sum())
    room = max(0, max_batch_tokens - num_rounds)
    num_others = pace.most_tokens(num_rounds, 0, min(num_prefill_left(prefilling), room))
    return DraftFacts(step, num_askable, num_rounds, num_others, room)
