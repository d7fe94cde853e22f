"""From the blocks of a step's rounds to how far each is verified: calibrated survivals, the budget, exploration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.core.admission import RankLimits
from actors.core.batching import StepShape, request_at
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.row_table import Mask, RowTable
from actors.core.step_decision import StepDecision
from actors.core.survival import survivals
from actors.core.verify_decision import VerifyDecider

Int32 = npt.NDArray[np.int32]


def decide_rounds(
    step: int,
    table: RowTable,
    shape: StepShape,
    limits: RankLimits,
    decider: VerifyDecider,
    calibration: RankCalibration,
) -> tuple[StepDecision, Drafted]:
    """Decide for the rounds of a step."""
    rounds, room = shape.rounds, shape.max_draft_tokens
    has_draft = table.has_draft[rounds]
    longest = np.minimum(table.num_remaining[rounds] - 1, limits.gamma)
    fitting = np.minimum(longest, table.draft_room(rounds))
    caps = np.where(has_draft, fitting, 0).astype(np.int32)
    drafted = Drafted(
        table.confidences[rounds],
        table.sampling.rule[rounds],
        table.stream_key[rounds],
        has_draft & ~table.has_rules[rounds],
    )
    drafted_len = table.drafted_len[rounds]
    is_drafted = np.arange(limits.gamma) < drafted_len[:, None]
    believed = np.where(is_drafted, calibration.adjust(drafted), np.float32(0.0))
    explored = calibration.explore(drafted, table.committed_len[rounds], caps, room)
    decision = decide_with_explored(
        decider,
        explored,
        step=step,
        request_ids=tuple(request_at(table, slot).request_id for slot in rounds.tolist()),
        survivals=survivals(believed, has_draft),
        caps=caps,
        has_draft=has_draft,
        room=room,
        num_prefill_tokens=shape.max_prefill,
        context_tokens=int(table.committed_len[rounds].sum()),
        is_unasked=table.is_unasked[rounds],
        class_ids=table.class_id[rounds],
        is_late=table.wants_draft[rounds],
    )
    decision = replace(decision, lacks_blocks=fitting < longest)
    return within_drafted(decision, drafted_len), drafted


def within_drafted(decision: StepDecision, drafted_len: Int32) -> StepDecision:
    """Let no row verify further than it was drafted, `drafted_len` [R].

    Only now: what a budget has left for the others, and what is set aside for explored rows, may not depend on where
    somebody's block stops, which its own tokens have a say in (C3).
    """
    planned = decision.planned_len
    return replace(
        decision,
        verify_len=np.minimum(decision.verify_len, drafted_len),
        planned_len=None if planned is None else np.minimum(planned, drafted_len),
        drafted_len=drafted_len,
    )


def decide_with_explored(
    decider: VerifyDecider, explored: Mask, *, caps: Int32, room: int, **facts: Any
) -> StepDecision:
    """`VerifyDecider.decide`, but the rows `explored` [R] are verified as far as they can be.

    Their tokens are set aside before the budget is spent, by what they could use at most: how much is left for the
    others may not depend on anybody's draft (C3).
    """
    num_reserved = int(caps[explored].sum())
    decision = decider.decide(caps=caps, room=room - num_reserved, **facts)
    if not num_reserved:
        return decision
    assert decision.bounds is not None
    verify_len = np.where(explored, decision.bounds, decision.verify_len)
    return replace(
        decision,
        verify_len=verify_len,
        planned_len=decision.verify_len,
        num_reserved=num_reserved,
    )
