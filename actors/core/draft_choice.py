"""Whom a rank asks for a block: while drafting pays, all that can use one; and how far it is worth drafting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.core.admission import RankLimits
from actors.core.batching import num_prefill_left
from actors.core.draft_stop import Asked, stop_survivals
from actors.core.prefill_pace import PrefillPace
from actors.core.rank_calibration import RankCalibration
from actors.core.rank_counters import RankCounters
from actors.core.request import Request
from actors.core.row_table import RowTable, Slots
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import DraftFacts, VerifyDecider


def choose_drafting(
    step: int,
    table: RowTable,
    askable: Slots,
    prefilling: Sequence[Request],
    limits: RankLimits,
    pace: PrefillPace,
    decider: VerifyDecider,
    counters: RankCounters,
    calibration: RankCalibration,
    last: VerifyChoice,
) -> Asked:
    """What is asked of the `askable` slots; `last` is how the step before was decided."""
    asked = Asked.whole(np.zeros(table.num_slots, np.bool_))
    if len(askable):
        most = limits.max_batch_tokens
        facts = draft_facts(step, table, len(askable), prefilling, most, pace)
        choice = decider.choose_drafting(facts)
        asked.asks[askable] = choice.asks
        counters.count_drafting(choice)
        if limits.stop_share:
            ahead, class_ids = decider.ahead(step, last), table.class_id[askable]
            stops = stop_survivals(ahead, limits.stop_share, class_ids)
            # What will be verified whatever it is worth is drafted so far too.
            needs = decider.forced(class_ids, limits.gamma) > 0
            needs |= calibration.foretell(table, askable)
            asked.min_survivals[askable] = np.where(needs, 0.0, stops)
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
