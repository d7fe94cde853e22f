"""How long steps took beside how long they were foretold to take: sums that only grow."""

from __future__ import annotations

from dataclasses import dataclass

from actors.core.messages import StepReport
from actors.core.sps import RankTimes


@dataclass
class StepClock:
    """Seconds of one rank.

    Only steps without prefill are foretold (the curve knows nothing of prefill tokens), so the two sums to compare
    are `predicted_s` and `compared_s`.
    """

    step_s: float = 0.0
    draft_wait_s: float = 0.0
    num_compared: int = 0
    predicted_s: float = 0.0
    compared_s: float = 0.0
    last_predicted_s: float | None = None

    def note(self, report: StepReport, times: RankTimes) -> None:
        """Count a step; `times` must not have learned from it yet."""
        self.step_s += report.step_time_s
        self.draft_wait_s += report.draft_wait_s
        self.last_predicted_s = None
        if times.curve is None or not report.num_requests or report.num_prefill_tokens:
            return
        tokens = report.batch_tokens
        predicted_s = float(times.curve.verify_time_s(tokens) * times.served.ratio(tokens))
        self.num_compared += 1
        self.predicted_s += predicted_s
        self.compared_s += report.step_time_s
        self.last_predicted_s = predicted_s
