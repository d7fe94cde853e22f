"""Who is measured, under which loads, and in which order. Pure.

Drift of the machine shall hit everybody alike. All contenders of one load are measured next to each other, in an order
that is turned from repeat to repeat; and since a drafter cannot be changed in a running cluster, the two clusters (ours
and MTP-1's) take turns by repeats: ours, MTP-1, MTP-1, ours, ours, … Both also measure `none`, so that a drift between
them can be seen and taken out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ClusterName = Literal["ours", "mtp1"]

NONE: Literal["none"] = "none"
MTP1: Literal["mtp1"] = "mtp1"
LAGGED = "lagged"
BRACKET = "none (MTP-1 cluster)"
FIXED = "fixed"
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    NONE: {"name": "none"},
    "threshold": {"name": "static_threshold"},
    LAGGED: {"name": "lagged"},
    "joint": {"name": "joint"},
}
ALL_POLICIES = (NONE, FIXED, MTP1, "threshold", LAGGED, "joint")


class PlanError(ValueError):
    """A contender or a load that cannot be measured; the message says what can."""


@dataclass(frozen=True)
class Contender:
    """One line of the plot.

    Attributes:
        policy: settings of `policy`, of a contender of ours.
        endpoint: URL of a peer's server; None: ours.
    """

    label: str
    cluster: ClusterName = "ours"
    policy: Mapping[str, Any] = field(default_factory=dict)
    endpoint: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.endpoint is not None


@dataclass(frozen=True)
class Cell:
    """One measurement: so many streams of one contender, kept in flight until the list of requests is served."""

    label: str
    concurrency: int
    temperature: float
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.label}|{self.concurrency}|{self.temperature:g}|{self.repeat}"


@dataclass(frozen=True)
class Session:
    """Cells that one cluster measures between its start and its end."""

    cluster: ClusterName
    cells: tuple[Cell, ...]


def fixed_label(length: int) -> str:
    return f"{FIXED}-{length}"


def contenders_of(
    names: Sequence[str], gamma: int, peers: Sequence[str] = ()
) -> tuple[Contender, ...]:
    """Contenders by their names, in the order of `ALL_POLICIES`, then the peers (`NAME=URL`).

    Args:
        names: of `ALL_POLICIES`, or `fixed-2`, `fixed-max`; `fixed` is every length up to gamma.
        gamma: draft tokens of our drafter's blocks.

    Raises:
        PlanError: an unknown or repeated name.
    """
    wanted: dict[str, Contender] = {}
    for name in names:
        for contender in _named(name, gamma):
            wanted[contender.label] = contender
    for peer in peers:
        label, _, url = peer.partition("=")
        if not label or not url.startswith(("http://", "https://")):
            raise PlanError(f"--endpoint {peer!r}: write NAME=http://HOST:PORT/v1")
        if label in wanted:
            raise PlanError(f"--endpoint {peer!r}: the name {label!r} is taken")
        wanted[label] = Contender(label, endpoint=url.rstrip("/"))
    return tuple(wanted.values())


def _named(name: str, gamma: int) -> list[Contender]:
    if name in _PLAIN:
        return [Contender(name, policy=_PLAIN[name])]
    if name == MTP1:
        one = {"name": "static_length", "static_length": 1}
        return [Contender(BRACKET, MTP1, _PLAIN[NONE]), Contender(MTP1, MTP1, one)]
    kind, _, length = name.partition("-")
    if kind == FIXED and (not length or length == "max" or length.isdigit()):
        lengths = range(1, gamma + 1)
        if length:
            lengths = range(_length(length, gamma), _length(length, gamma) + 1)
        if not all(1 <= one <= gamma for one in lengths):
            raise PlanError(f"--policies {name}: lengths go from 1 to drafter.gamma = {gamma}")
        return [
            Contender(fixed_label(one), policy={"name": "static_length", "static_length": one})
            for one in lengths
        ]
    raise PlanError(f"--policies {name}: use {', '.join(ALL_POLICIES)}, or fixed-2, fixed-max")


def _length(text: str, gamma: int) -> int:
    return gamma if text == "max" else int(text)


def quick_policies(gamma: int) -> tuple[str, ...]:
    """Those that say most."""
    fixed = (fixed_label(one) for one in sorted({1, min(3, gamma), gamma}))
    return (NONE, *fixed, MTP1, LAGGED)


def is_fixed(label: str) -> bool:
    """Whether the contender is `none` or a fixed length: what the scheduler must not lose to."""
    return label == NONE or label.startswith(f"{FIXED}-")


def sessions_of(
    contenders: Sequence[Contender],
    concurrencies: Sequence[int],
    temperatures: Sequence[float],
    repeats: int,
    seed: int = 0,
) -> list[Session]:
    """All cells in the order of their measurement."""
    by_cluster = {
        name: [c.label for c in contenders if c.cluster == name] for name in ("ours", MTP1)
    }
    turns: list[tuple[ClusterName, list[Cell]]] = []
    for repeat in range(repeats):
        clusters: list[ClusterName] = ["ours", "mtp1"]
        for name in clusters if repeat % 2 == 0 else reversed(clusters):
            cells = _cells(by_cluster[name], concurrencies, temperatures, repeat, repeats, seed)
            if not cells:
                continue
            if turns and turns[-1][0] == name:
                turns[-1][1].extend(cells)
            else:
                turns.append((name, cells))
    return [Session(name, tuple(cells)) for name, cells in turns]


def _cells(
    labels: Sequence[str],
    concurrencies: Sequence[int],
    temperatures: Sequence[float],
    repeat: int,
    repeats: int,
    seed: int,
) -> list[Cell]:
    """Those of one repeat in one cluster: load after load, and under each load one contender after the other."""
    loads = [(temperature, count) for temperature in temperatures for count in concurrencies]
    random.Random(f"{seed}-loads-{repeat}").shuffle(loads)
    cells = []
    for temperature, count in loads:
        order = list(labels)
        random.Random(f"{seed}-{temperature:g}-{count}").shuffle(order)
        # Turned by an even share each time, so that over the repeats everybody comes early and late alike.
        start = len(order) * repeat // repeats
        cells += [
            Cell(label, count, temperature, repeat) for label in order[start:] + order[:start]
        ]
    return cells


def seconds_left(
    measured: Sequence[tuple[int, float]], left: Sequence[int], num_requests: Mapping[int, int]
) -> float | None:
    """Estimated seconds for the cells that are left; None before the first is measured.

    Args:
        measured: concurrency and seconds of each cell so far.
        left: concurrency of each cell to come.
        num_requests: of a cell, by concurrency.
    """
    if not measured:
        return None
    per_request: dict[int, list[float]] = {}
    for count, seconds in measured:
        per_request.setdefault(count, []).append(seconds / num_requests[count])

    def cost(count: int) -> float:
        nearest = min(per_request, key=lambda known: abs(known - count))
        known = per_request[nearest]
        return num_requests[count] * sum(known) / len(known)

    return sum(map(cost, left))
