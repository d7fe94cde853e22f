"""Which rank has served a prompt's beginning last: its K/V is likely to be there still. A guess, never relied on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

SHORTEST_TOKENS = 32  # a shorter beginning saves nothing worth going elsewhere for
MOST_REMEMBERED = 8192  # beginnings


class PrefixAffinity:
    """Beginnings of 32, 64, 128 … tokens and the rank each was sent to last; the least recent are forgotten."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._rank_of: OrderedDict[int, str] = OrderedDict()

    def note(self, prompt_ids: Sequence[int], rank: str) -> None:
        """This prompt goes to that rank."""
        for _, key in _beginnings(prompt_ids):
            self._rank_of[key] = rank
            self._rank_of.move_to_end(key)
        while len(self._rank_of) > self._most:
            self._rank_of.popitem(last=False)

    def find(self, prompt_ids: Sequence[int]) -> tuple[str, int] | None:
        """The rank of the longest known beginning, and the beginning's length in tokens."""
        found: tuple[str, int] | None = None
        for length, key in _beginnings(prompt_ids):
            rank = self._rank_of.get(key)
            if rank is None:
                break
            found = rank, length
        return found


def _beginnings(prompt_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    start, end, key = 0, SHORTEST_TOKENS, 0
    while end <= len(prompt_ids):
        # A collision sends a prompt to a rank that knows nothing of it, no more.
        key = hash((key, tuple(prompt_ids[start:end])))
        yield end, key
        start, end = end, 2 * end
