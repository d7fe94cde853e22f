"""Which settings each member of a cluster runs with. A configuration that is rolled out is a new revision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from configs.schema import ClusterConfig

FIRST = 1  # what the cluster was started with


@dataclass(frozen=True)
class Revision:
    """One configuration; numbers rise. A negative one: the member is parked, with the settings of that number."""

    number: int
    config: ClusterConfig

    @property
    def is_parked(self) -> bool:
        return self.number < 0


@dataclass(frozen=True)
class Assignment:
    """What the supervisor wants of every member.

    All members carry it, so that a supervisor that starts again knows what the one before it wanted.

    Attributes:
        version: rises with every change; a newer one replaces an older one.
        current: the newest revision that all members have come to.
        revisions: those that are in use, by number.
        numbers: of the revision of each member that runs another one than the current; negative where it is parked.
        drained: members that shall take nothing new, by order of the operator.
    """

    version: int
    current: int
    revisions: Mapping[int, ClusterConfig]
    numbers: Mapping[str, int] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()

    @classmethod
    def first(cls, config: ClusterConfig) -> Assignment:
        """That of a cluster as it was started."""
        return cls(0, FIRST, {FIRST: config})

    def number_of(self, member: str) -> int:
        return self.numbers.get(member, self.current)

    def of(self, member: str) -> Revision:
        """What this member shall start with."""
        number = self.number_of(member)
        return Revision(number, self.revisions[abs(number)])

    @property
    def config(self) -> ClusterConfig:
        """Of the current revision."""
        return self.revisions[self.current]

    def propose(self, config: ClusterConfig) -> tuple[Assignment, int]:
        """Know this configuration too; nobody runs it yet. Returns its number: a known one keeps its own."""
        for number, known in self.revisions.items():
            if known == config:
                return self, number
        number = max(self.revisions) + 1
        return replace(self, revisions={**self.revisions, number: config}), number

    def give(self, members: Iterable[str], number: int) -> Assignment:
        """These members shall run that revision from their next start on."""
        return replace(self, numbers={**self.numbers, **dict.fromkeys(members, number)})

    def settle(self, number: int) -> Assignment:
        """All members have come to that revision: forget what nobody runs any more."""
        parked = {name: -number for name, old in self.numbers.items() if old < 0}
        return replace(
            self, current=number, numbers=parked, revisions={number: self.revisions[number]}
        )

    def drain(self, members: Iterable[str], *, is_drained: bool) -> Assignment:
        """These members shall take nothing new, or shall again."""
        named = frozenset(members)
        return replace(self, drained=self.drained | named if is_drained else self.drained - named)
