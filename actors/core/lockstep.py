"""What the ranks of a group decide together before every step: one vote a rank, one layout for all (contract C5).

Every rank enters the same collectives in the same order in every step, with work or without. Nothing shapes a
collective but what this module makes of the gathered votes, and every rank makes the same of them: token counts are
each rank's own say, everything else is what rank 0 says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt

PROTOCOL = 1  # of votes: ranks of different versions must not step together
ABSENT = -1

Int64 = npt.NDArray[np.int64]


class CollectiveError(RuntimeError):
    """A collective failed or did not complete in time: another rank has ended or stands still."""


class LockstepError(RuntimeError):
    """The ranks of a group have parted; the message names them and what differs. The group must be formed anew."""


@dataclass(frozen=True)
class Vote:
    """What one rank says before a step."""

    step: int  # steps agreed on so far, the same on all ranks
    num_tokens: int  # of its own forward; 0 when it is idle, waits, or has nothing better to do
    is_leaving: bool = False  # it steps no more after this
    is_leading: bool = False  # rank 0: what follows are steps of its own, such as measurements
    plan_epoch: int = 0  # newest expert placement this rank is ready for
    profile_epoch: int = 0  # newest cost curve it knows
    protocol: int = PROTOCOL

    def pack(self) -> Int64:
        """[FIELDS] numbers, for the collective."""
        assert self.num_tokens >= 0
        return np.array([int(value) for value in astuple(self)], np.int64)


VOTE_LEN = len(fields(Vote))


@dataclass(frozen=True)
class StepLayout:
    """What a step looks like; the same on every rank of the group."""

    step: int
    num_tokens: tuple[int, ...]  # [ranks]
    leaving: tuple[int, ...]  # ranks that step no more after this
    is_led: bool
    plan_epoch: int  # expert placement of this step
    profile_epoch: int

    @property
    def runs(self) -> bool:
        """Whether there is a forward at all: all ranks enter its collectives, or none does."""
        return any(self.num_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the fullest rank: what gathered buffers are padded to."""
        return max(self.num_tokens)

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest rank over the mean; 1 when all carry the same or nothing runs."""
        total = sum(self.num_tokens)
        return self.most_tokens * len(self.num_tokens) / total if total else 1.0


def agree(votes: npt.ArrayLike, current_plan: int = 0) -> StepLayout:
    """The layout that `votes` [ranks, VOTE_LEN] make, in the order of ranks.

    Args:
        current_plan: the placement of the last step. It changes to the one of rank 0's vote in the first step for
            which every rank has voted that it is ready.

    Raises:
        LockstepError: ranks count different steps or speak different versions.
    """
    table = np.asarray(votes, np.int64)
    assert table.ndim == 2 and table.shape[1] == VOTE_LEN, table.shape
    said = [_unpack(row) for row in table]
    first = said[0]
    for what in ("protocol", "step"):
        values = [getattr(vote, what) for vote in said]
        if len(set(values)) > 1:
            apart = [rank for rank, value in enumerate(values) if value != values[0]]
            raise LockstepError(
                f"ranks {apart} are at {what} {[values[rank] for rank in apart]}, rank 0 is at {values[0]}"
            )
    is_ready = all(vote.plan_epoch >= first.plan_epoch for vote in said)
    return StepLayout(
        step=first.step,
        num_tokens=tuple(vote.num_tokens for vote in said),
        leaving=tuple(rank for rank, vote in enumerate(said) if vote.is_leaving),
        is_led=first.is_leading,
        plan_epoch=first.plan_epoch if is_ready else current_plan,
        profile_epoch=first.profile_epoch,
    )


def _unpack(row: Int64) -> Vote:
    step, num_tokens, is_leaving, is_leading, plan, profile, protocol = row.tolist()
    return Vote(step, num_tokens, bool(is_leaving), bool(is_leading), plan, profile, protocol)


@dataclass
class Progress:
    """How far a rank has come through its collectives; a watchdog reads it from another thread.

    A rank that waits in a collective for longer than `bound_s` is held up by another one: its loop is alive, its group
    is not.
    """

    bound_s: float
    num_steps: int = 0
    num_collectives: int = 0
    entered_at: float | None = None  # when the collective under way was entered; None between two

    def enter(self, now: float) -> None:
        self.entered_at = now

    def leave(self) -> None:
        self.entered_at = None
        self.num_collectives += 1

    def waited_s(self, now: float) -> float:
        """Seconds in the collective under way; 0 between two."""
        entered = self.entered_at  # read once: the loop thread may leave meanwhile
        return 0.0 if entered is None else now - entered

    def is_stuck(self, now: float, slack: float = 1.0) -> bool:
        """Whether the collective under way has taken longer than `slack` times the bound."""
        return self.waited_s(now) > slack * self.bound_s


def group_of(rank: int, group_size: int) -> tuple[int, int]:
    """(group, rank within it) of the cluster's rank `rank`: neighbours share a group."""
    return rank // group_size, rank % group_size


@dataclass(frozen=True)
class Formation:
    """A group to be formed: who is in it, and where its ranks find each other."""

    epoch: int  # rises with every formation; ranks of different ones never meet
    rank: int  # the receiver's place
    incarnations: tuple[str, ...]  # [ranks] which process of each seat is meant
    address: str  # host:port where rank 0 keeps the store


@dataclass
class GroupBook:
    """When a group is formed: as soon as every rank's present process waits for it, and never twice for the same ones.

    Attributes:
        members: names of the ranks, rank 0 first.
    """

    members: tuple[str, ...]
    epoch: int
    formed: tuple[str, ...] = ()  # incarnations of the last formation

    def form(self, waiting: Sequence[tuple[str, str] | None]) -> list[Formation] | None:
        """Formations for all members, or None while one is missing.

        Args:
            waiting: of each member (incarnation, address of the store it offers) if its process waits to be put into
                a group, else None.
        """
        present = [offer for offer in waiting if offer is not None]
        if len(present) < len(self.members):
            return None
        incarnations = tuple(incarnation for incarnation, _ in present)
        if incarnations != self.formed:
            # Told again and again until all have left the waiting room; the epoch only rises with new processes.
            self.formed = incarnations
            self.epoch += 1
        address = present[0][1]
        return [
            Formation(self.epoch, rank, incarnations, address) for rank in range(len(self.members))
        ]

    def held_up(self, silent_s: Sequence[float | None], bound_s: float) -> list[str]:
        """Members that have been silent beyond the bound: they hold up the others and must end.

        Args:
            silent_s: [ranks] seconds since each last answered; None: it is not yet so far as to step with others.
        """
        return [
            name
            for name, silent in zip(self.members, silent_s, strict=True)
            if silent is not None and silent > bound_s
        ]
