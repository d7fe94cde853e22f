"""A rank's side of its group while the model computes: the vote before a step, and the layout that all agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from actors.core.lockstep import VOTE_LEN, StepLayout, Vote, agree
from actors.engine.collective import Collective, all_gather

_NOTHING = StepLayout(-1, (), (), False, 0, 0)


class ExpertGroup:
    """The ranks that share one copy of the experts and step together, seen from one of them.

    Args:
        rank, size: this rank's place, which says what it loads; known before the others are met.
        device: where votes must lie for the collective.

    Attributes:
        on_layout: is told of every layout before it is computed; it may make collectives of its own, as all ranks do.
        balance: load of the hottest rank over the mean (None: not looked at yet), how often experts were moved and how
            often that failed, for whoever asks.
        shared_s: seconds spent so far in what the group does together: votes and shared layers, waiting for the others
            included. Read off the CPU's clock, so of a GPU's work it says nothing.
    """

    def __init__(self, rank: int, size: int, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device
        self.node = 0  # ranks of one machine have the same number
        self.on_layout: Callable[[StepLayout], None] | None = None
        self.balance: dict[str, Any] = {
            "expert_imbalance": None,
            "num_rebalances": 0,
            "num_failed_rebalances": 0,
        }
        self.shared_s = 0.0
        self._collective: Collective | None = None
        self.layout = _NOTHING
        self.is_leading = False  # of rank 0: the others only follow, see `Vote.is_leading`
        self.plan_epoch = self.profile_epoch = 0
        self._num_votes = 0

    def attach(self, collective: Collective) -> None:
        """The others have been met: from here on this rank steps with them."""
        assert (collective.rank, collective.size) == (self.rank, self.size)
        self._collective, self._num_votes, self.layout = collective, 0, _NOTHING

    @property
    def collective(self) -> Collective:
        assert self._collective is not None, "this rank has not met its group"
        return self._collective

    @property
    def num_own(self) -> int:
        """This rank's tokens in the step under way."""
        return self.layout.num_tokens[self.rank]

    def agree(self, num_tokens: int, *, is_leaving: bool = False) -> StepLayout:
        """Vote and learn what the step looks like; all ranks call this before every step, with work or without.

        Raises CollectiveError when a rank does not come and LockstepError when the ranks have parted.
        """
        vote = Vote(
            self._num_votes,
            num_tokens,
            is_leaving,
            self.is_leading,
            self.plan_epoch,
            self.profile_epoch,
        )
        own = torch.from_numpy(vote.pack()).to(self.device)
        started = time.perf_counter()
        votes = all_gather(self.collective, own).cpu().numpy()
        self.shared_s += time.perf_counter() - started
        assert votes.shape == (self.size, VOTE_LEN)
        self.layout = agree(votes, max(0, self.layout.plan_epoch))
        self._num_votes += 1
        self.collective.progress.num_steps += self.layout.runs
        if self.on_layout is not None:
            self.on_layout(self.layout)
        return self.layout

    def all_say(self, own: bool) -> bool:
        """Whether every rank says so; all ranks must ask."""
        said = torch.tensor([int(own)], device=self.device)
        return bool(all_gather(self.collective, said).all())

    def share(self, values: Sequence[float]) -> list[float]:
        """Rank 0's values, on all ranks; what the others give is ignored."""
        own = values if self.rank == 0 else ()
        lengths = all_gather(self.collective, torch.tensor([len(own)], device=self.device))
        length = int(lengths[0, 0])
        row = torch.zeros(length, dtype=torch.float64, device=self.device)
        if len(own):
            row[:] = torch.tensor(list(own), dtype=torch.float64)
        found: list[float] = all_gather(self.collective, row)[0].tolist()
        return found
