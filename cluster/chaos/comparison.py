"""Tokens that a client got against those it should have got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher


@dataclass(frozen=True)
class Difference:
    """In tokens. A reordered one counts as lost where it should stand and as changed where it stands."""

    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0

    def __bool__(self) -> bool:
        return bool(self.num_lost or self.num_repeated or self.num_changed)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.num_lost + other.num_lost,
            self.num_repeated + other.num_repeated,
            self.num_changed + other.num_changed,
        )


def compare(expected: Sequence[int], got: Sequence[int], *, is_whole: bool) -> Difference:
    """What is wrong with `got`; of a stream that is not whole only what did arrive is judged.

    The smallest set of edits is not always what happened, but no difference goes unnoticed.
    """
    if tuple(got) == tuple(expected if is_whole else expected[: len(got)]):
        return Difference()
    lost = repeated = changed = 0
    edits = SequenceMatcher(a=expected, b=got, autojunk=False).get_opcodes()
    if not is_whole and edits[-1][0] == "delete":
        edits.pop()  # what had not come yet
    for tag, i1, i2, j1, j2 in edits:
        if tag == "delete":
            lost += i2 - i1
        elif tag == "insert":
            count, extra = j2 - j1, list(got[j1:j2])
            before, behind = list(expected[max(0, i1 - count) : i1]), list(expected[i1:][:count])
            if extra in (before, behind):
                repeated += count
            else:
                changed += count
        elif tag == "replace":
            changed += j2 - j1
            lost += max(0, (i2 - i1) - (j2 - j1)) if is_whole or i2 < len(expected) else 0
    return Difference(lost, repeated, changed)
