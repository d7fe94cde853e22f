"""The settings of what a rank learns about its drafter's confidences while it serves."""

from __future__ import annotations

from pydantic import Field

from configs.section import Section


class CalibrationConfig(Section):
    """Confidences kept true while serving."""

    online: bool = Field(
        True,
        description="Whether confidences are corrected by what became of earlier drafts; false = as the drafter gives "
        "them, nothing explored.",
    )
    explore_share: float = Field(
        1 / 64,
        ge=0,
        le=0.25,
        description="Share of rounds verified whole although the budget would cut them (a probability), so that no "
        "position goes unseen; only under policies that trim.",
    )
    looks_per_alarm: float = Field(
        200.0,
        ge=10,
        le=1e6,
        description="Looks for a change of the traffic (every 4 steps, 32 rounds at least) until a false alarm, "
        "in the mean at least; an alarm makes older rounds count for next to nothing.",
    )
