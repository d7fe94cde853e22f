"""The settings of how many ranks serve."""

from __future__ import annotations

from pydantic import Field

from configs.section import Section


class AutoscaleConfig(Section):
    """Ranks that serve, by predicted time per token. A parked rank keeps its place, without weights or memory."""

    enabled: bool = Field(
        False,
        description="Whether ranks (of a group all) are parked while the load does not need them, and started again.",
    )
    min_ranks: int = Field(1, ge=1, le=1024, description="Ranks that always serve.")
    target_tpot_ms: float = Field(
        100.0,
        gt=0,
        description="Milliseconds a token: a parked rank starts when one more stream would wait longer everywhere; "
        "in fractions of seconds.",
    )
    park_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="A rank is parked only while the others would stay below this share of target_tpot_ms (as a "
        "probability, between 0 and 1).",
    )
    up_after_s: float = Field(
        10.0, ge=0, description="How long it must be too slow before a rank starts, in seconds."
    )
    down_after_s: float = Field(
        300.0, ge=0, description="How long fewer must do before a rank is parked, in seconds."
    )
    cooldown_s: float = Field(
        120.0, ge=0, description="Nothing changes for so long after a change, in seconds."
    )
