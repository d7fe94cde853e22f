"""How the load changes over time: from seconds to users (closed loop) or arrivals a second (open loop)."""

from __future__ import annotations

from collections.abc import Callable

Level = Callable[[float], float]  # share of the peak at t in 0..1 of the run

RAMP_END = 0.8
SPIKE = (0.4, 0.6)
SPIKE_BASE = 0.25
NUM_STEPS = 5


def constant(_t: float) -> float:
    """The peak from start to end."""
    return 1.0


def ramp(t: float) -> float:
    """A line from nothing to the peak, held for the last fifth."""
    return min(1.0, t / RAMP_END)


def spike(t: float) -> float:
    """A quarter of the peak, and the peak for the middle fifth."""
    return 1.0 if SPIKE[0] <= t < SPIKE[1] else SPIKE_BASE


def steps(t: float) -> float:
    """Five equal stairs up to the peak."""
    return min(NUM_STEPS, int(t * NUM_STEPS) + 1) / NUM_STEPS


SHAPES: dict[str, Level] = {"constant": constant, "ramp": ramp, "spike": spike, "steps": steps}


def users_at(shape: str, peak: int, elapsed_s: float, duration_s: float) -> int | None:
    """Users that should run now, at least one; None when the run is over."""
    if elapsed_s >= duration_s:
        return None
    return max(1, round(peak * SHAPES[shape](elapsed_s / duration_s)))


def rate_at(shape: str, peak: float, elapsed_s: float, duration_s: float) -> float:
    """Arrivals a second now."""
    return peak * SHAPES[shape](min(1.0, elapsed_s / duration_s))
