"""What budgets are decided from, and who decides them: every rank for itself, or several at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.core.messages import StepReport
from actors.core.prefix_scheduler import Budget, lagged_budget
from actors.core.sps import RankTimes

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RankView:
    """What a budget for one rank is decided from."""

    rank: str
    survivals: Float32  # [R, gamma], at least LAG_STEPS older than the steps the budget will steer
    num_other_tokens: int
    times: RankTimes


class BudgetSolver(Protocol):
    """From the views of all ranks and the least gain to one budget a rank."""

    def __call__(self, views: list[RankView], min_predicted_gain: float) -> list[Budget]: ...

    def observe(self, report: StepReport) -> bool:
        """Learn from a report. Whether its step time is the rank's own, not that of a group that steps together."""

    def forget(self, rank: str) -> None:
        """The rank is gone: it weighs in no plan any more."""

    def prediction_error(self, rank: str) -> float | None:
        """Mean relative error of the step times predicted for the rank's group; None: it is in none."""


class EachAlone:
    """Every rank by itself: right for ranks that share nothing (C6, the special case of one rank)."""

    def __call__(self, views: list[RankView], min_predicted_gain: float) -> list[Budget]:
        return [
            lagged_budget(view.survivals, view.times, view.num_other_tokens, min_predicted_gain)
            for view in views
        ]

    def observe(self, report: StepReport) -> bool:
        return report.step >= 0

    def forget(self, rank: str) -> None:
        """Nothing is kept."""

    def prediction_error(self, rank: str) -> float | None:
        assert rank
        return None
