"""What deciders by thresholds share: since when something has held, and times for people."""

from __future__ import annotations


def since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when it has held without a break; None while it does not. `before`: the answer of the last look."""
    if not holds:
        return None
    return now if before is None else before


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
