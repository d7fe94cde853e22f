"""What a rank shows of itself to people and dashboards: plain numbers, made only when somebody asks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from actors.core.rank_counters import RankCounters
from actors.core.sps import RankTimes
from actors.core.step_clock import StepClock
from actors.core.step_commit import Commit, StepInFlight

MAX_ROWS = 16  # rounds of a step that are shown


def rank_view(
    counters: RankCounters,
    clock: StepClock,
    times: RankTimes,
    last: tuple[StepInFlight, Commit] | None,
) -> dict[str, Any]:
    """Acceptance by position, seconds, the cost curve, and why the last step was decided as it was; JSON-able.

    Args:
        last: the step that ran last, with what it committed; None before the first one.
    """
    acceptance = counters.acceptance
    return {
        "acceptance": {
            "num_rounds": acceptance.num_rounds,
            "proposed": acceptance.proposed.tolist(),
            "scheduled": acceptance.scheduled.tolist(),
            "accepted": acceptance.accepted.tolist(),
            "expected": acceptance.expected.tolist(),
        },
        "clock": asdict(clock),
        "curve": _curve(times),
        "last_step": None if last is None else _step(*last),
    }


def _curve(times: RankTimes) -> dict[str, Any] | None:
    """Measured seconds of a step by its batch tokens, and as corrected by the steps served since."""
    curve = times.curve
    if curve is None:
        return None
    corrected = curve.step_time_s * times.served.ratio(curve.batch_tokens)
    return {
        "batch_tokens": curve.batch_tokens.astype(np.int64).tolist(),
        "measured_s": curve.step_time_s.tolist(),
        "corrected_s": corrected.tolist(),
        "doubt": times.doubt,
    }


def _step(flight: StepInFlight, commit: Commit) -> dict[str, Any]:
    decision = flight.decision
    return {
        "step": decision.step,
        "rule": decision.choice.rule,
        "max_draft_tokens": decision.choice.max_draft_tokens,
        "min_survival": decision.choice.min_survival,
        "num_requests": flight.num_rounds,
        "num_prefill_tokens": flight.num_prefill_tokens,
        "batch_tokens": flight.plan.batch_tokens,
        "num_scheduled": int(decision.verify_len.sum()),
        "rounds": [
            {
                "request_id": decision.request_ids[row],
                "has_block": bool(decision.has_draft[row]),
                "survivals": [round(float(a), 4) for a in decision.survivals[row]],
                "num_scheduled": int(decision.verify_len[row]),
                "num_accepted": int(commit.num_accepted[row]),
                "cut_by": decision.cut_by(row),
                "explored": decision.is_explored(row),
            }
            for row in range(min(flight.num_rounds, MAX_ROWS))
        ],
    }
