"""What every part of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration. Strict: `yes` is no number and "2" is no integer."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, strict=True, allow_inf_nan=False
    )
