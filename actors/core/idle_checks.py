"""Whether everything is back at its baseline whenever a rank has become idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.core.rank import Rank


class IdleChecks:
    """One check each time the rank becomes idle.

    Attributes:
        problems: what the last one found.
    """

    def __init__(self) -> None:
        self.num_checks = self.num_problems = 0
        self.problems: tuple[str, ...] = ()
        self._is_due = False

    def note_step(self) -> None:
        """The rank is busy."""
        self._is_due = True

    def look(self, rank: Rank) -> tuple[str, ...]:
        """What this check found; nothing when the rank was checked since its last step."""
        if not self._is_due:
            return ()
        self._is_due = False
        self.num_checks += 1
        self.problems = tuple(rank.check_idle())
        self.num_problems += len(self.problems)
        return self.problems

    def stats(self) -> dict[str, int | list[str]]:
        """For `stats` of the rank."""
        return {
            "num_idle_checks": self.num_checks,
            "num_idle_problems": self.num_problems,
            "idle_problems": list(self.problems),
        }
