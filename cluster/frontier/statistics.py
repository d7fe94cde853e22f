"""Medians, spreads and ratios over repeats. Pure.

`spread` is half the distance between the largest and the smallest repeat, in the unit of the median: with three
repeats, more cannot honestly be said. A ratio is formed within each repeat, whose cells were measured next to each
other, and its median and spread are those of these ratios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

Curve = Sequence[tuple[float, float]]  # (node, user) tokens/s, a point for each concurrency


@dataclass(frozen=True)
class Spread:
    """A number measured several times."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.repeats)

    @property
    def spread(self) -> float:
        return (max(self.repeats) - min(self.repeats)) / 2

    def as_json(self) -> dict[str, Any]:
        return {
            "median": round(self.median, 4),
            "spread": round(self.spread, 4),
            "repeats": [round(value, 4) for value in self.repeats],
        }


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Of the repeats that have a value; None without any."""
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None


def paired(over: Mapping[int, float], under: Mapping[int, float]) -> Spread | None:
    """The ratio of two contenders, each given by repeat; None when they share no repeat."""
    common = sorted(over.keys() & under.keys())
    return spread_of([over[repeat] / under[repeat] for repeat in common if under[repeat]])


def best(rates: Mapping[str, Mapping[int, float]]) -> str | None:
    """The contender with the highest median over its repeats; None without any."""
    medians = {label: median(of.values()) for label, of in rates.items() if of}
    return max(medians, key=medians.__getitem__) if medians else None


@dataclass(frozen=True)
class Matched:
    """What a frontier gives at another's throughput. `is_bound`: its own least load already brings that much or more,
    so that its speed is a lower bound of what it could give."""

    user_tokens_per_s: float
    is_bound: bool = False


def at_throughput(curve: Curve, node_tokens_per_s: float) -> Matched | None:
    """Speed per user at a throughput, by lines between the points of a frontier; None where it does not reach so far.

    Points that another one beats on both axes are no part of a frontier.
    """
    frontier = [
        (node, user)
        for node, user in curve
        if not any(
            other_node >= node and other_user >= user and (other_node, other_user) != (node, user)
            for other_node, other_user in curve
        )
    ]
    frontier = sorted(set(frontier))
    if not frontier or node_tokens_per_s > frontier[-1][0]:
        return None
    if node_tokens_per_s <= frontier[0][0]:
        return Matched(frontier[0][1], is_bound=node_tokens_per_s < frontier[0][0])
    for (low, fast), (high, slow) in pairwise(frontier):
        if node_tokens_per_s <= high:
            share = (node_tokens_per_s - low) / (high - low)
            return Matched(fast + share * (slow - fast))
    raise AssertionError("a throughput within the frontier lies between two of its points")
