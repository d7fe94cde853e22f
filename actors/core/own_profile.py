"""The cost curve a rank has measured of itself: what it decides by, and what it tells the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from actors.core.messages import Endpoint, RankProfile
from actors.core.sps import FLAT_RATIO, CostCurve, CurveError, RankTimes, draft_times_at


class StepTimes(NamedTuple):
    """Complete steps as they were measured."""

    batch_tokens: npt.NDArray[np.integer]  # [G]
    num_requests: npt.NDArray[np.integer]  # [G]
    step_time_s: npt.NDArray[np.float64]  # [G] medians
    shared_time_s: npt.NDArray[np.float64] | None = None  # [G] see `RankProfile`


class OwnProfile:
    """Keeps `times` on the newest curve.

    Attributes:
        message: for the allocator.
        problem: why no budget is searched over this curve, and what to do; empty when it is good. The rank then
            verifies what is more likely accepted than not: never everything, and never without saying so.
    """

    def __init__(
        self, rank: Endpoint, identity: str, measured: StepTimes, gamma: int, times: RankTimes
    ) -> None:
        self._times = times
        self._learn(
            RankProfile(
                rank=rank,
                identity=identity,
                batch_tokens=measured.batch_tokens.astype(np.int32),
                num_requests=measured.num_requests.astype(np.int32),
                step_time_s=measured.step_time_s.astype(np.float64),
                draft_time_s=np.zeros(len(measured.batch_tokens)),
                gamma=gamma,
                shared_time_s=measured.shared_time_s,
            )
        )

    def take_draft_times(self, measured: Sequence[tuple[int, float]]) -> None:
        """The rank's drafter has changed: (requests, seconds) of drafting, at least one, ascending."""
        sizes, seconds = zip(*measured, strict=True)
        draft_time_s = draft_times_at(self.message.num_requests, sizes, seconds)
        self._learn(replace(self.message, draft_time_s=draft_time_s))

    def _learn(self, message: RankProfile) -> None:
        self.message = message
        self.problem = ""
        try:
            curve = CostCurve.of(message)
        except CurveError as error:
            self.problem = f"the measured cost curve is refused: {error}"
            return
        self._times.measured(curve)
        if curve.is_flat:
            self.problem = (
                f"the measured cost curve is flat ({curve.batch_tokens[0]:.0f} to {curve.batch_tokens[-1]:.0f} tokens "
                f"cost the same within {FLAT_RATIO - 1:.0%}): it says nothing of what a token costs and is not used; "
                "raise target.max_batch_tokens, or measure again with `dspark profile --refresh`"
            )
