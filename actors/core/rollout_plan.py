"""Before a rollout: which members restart together, in which order, and whether somebody serves meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["drafter", "target"]


@dataclass(frozen=True)
class Unit:
    """Members that restart together."""

    members: tuple[str, ...]
    role: Role


@dataclass(frozen=True)
class Bounds:
    """How long things may take, in seconds."""

    drain_s: float = 30.0  # streams may end by themselves for so long, then they move
    room_s: float = 300.0  # and wait for room on other ranks so long
    start_s: float = 900.0  # from a restart to ready
    allows_pause: bool = False  # even where no other rank can take the streams meanwhile


class NobodyLeftError(ValueError):
    """The ranks to be restarted are all there are: nobody would serve meanwhile."""


def members_with(name: str, groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The ranks that step together with this one, itself among them."""
    return next((group for group in groups if name in group), (name,))


def units_of(
    drafters: Iterable[str], ranks: Iterable[str], groups: Sequence[tuple[str, ...]]
) -> tuple[Unit, ...]:
    """Members in the order of their turns: drafters first, then ranks; of a group all or none."""
    units = [Unit((name,), "drafter") for name in drafters]
    together = dict.fromkeys(members_with(name, groups) for name in ranks)
    return (*units, *(Unit(members, "target") for members in together))


def require_somebody_left(units: Iterable[Unit], ranks: Collection[str], bounds: Bounds) -> None:
    """Raises NobodyLeftError when a unit holds all the ranks there are and a pause is not allowed."""
    for unit in units:
        if set(ranks) <= set(unit.members) and not bounds.allows_pause:
            raise NobodyLeftError(
                f"{' and '.join(unit.members)} must start again and no other rank can serve meanwhile: new requests "
                "would be refused and running streams stand still, and end after ingress.replay_timeout_s. Deploy "
                "with more ranks (target.num_ranks), or allow the pause (--allow-pause)"
            )
