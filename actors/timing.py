"""How long a rank's decisions take: `actors/core` holds no clock, so its shell puts one around them."""

from __future__ import annotations

import time
from typing import Any

from actors.core.step_decision import StepDecision
from actors.core.verify_decision import DraftChoice, DraftFacts, VerifyDecider


class TimedDecider(VerifyDecider):
    """A `VerifyDecider` that adds up the seconds of the decisions on the critical path of every step.

    Attributes:
        seconds: spent in `decide` and `choose_drafting` since the start.
    """

    seconds = 0.0

    def decide(self, *arguments: Any, **named: Any) -> StepDecision:
        started = time.perf_counter()
        try:
            return super().decide(*arguments, **named)
        finally:
            self.seconds += time.perf_counter() - started

    def choose_drafting(self, facts: DraftFacts) -> DraftChoice:
        started = time.perf_counter()
        try:
            return super().choose_drafting(facts)
        finally:
            self.seconds += time.perf_counter() - started

    def cost(self, step_s: float) -> dict[str, float | None]:
        """Seconds, and as a share of the seconds of all steps; None before the first."""
        share = self.seconds / step_s if step_s else None
        return {"decision_s": self.seconds, "decision_share": share}
