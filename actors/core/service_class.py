"""Classes of service on a rank: whose draft tokens go first inside a budget, and how many each request may verify.

Contract C3: the weight of a class is a constant, or follows what was served at least two steps before; it never looks
at the drafts it ranks. Worth (survival times weight) then falls along a row as survivals do, so ranking by it is as
lawful as ranking by survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from actors.core.prefix_scheduler import allocate
from actors.core.step_decision import VerifyChoice
from configs.policy import PolicyConfig

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Ids = npt.NDArray[np.integer]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ServiceClass:
    """What the requests of one tenant or class are owed."""

    name: str
    weight: float = 1.0
    max_tpot_s: float | None = None  # deadline: mean seconds a token
    min_verify_len: int = 0  # draft tokens that are verified whatever they are worth
    max_verify_len: int | None = None

    def __post_init__(self) -> None:
        assert self.weight > 0 and self.min_verify_len >= 0
        assert self.max_tpot_s is None or self.max_tpot_s > 0
        assert self.max_verify_len is None or self.max_verify_len >= self.min_verify_len

    def longest(self, gamma: int) -> int:
        return gamma if self.max_verify_len is None else min(self.max_verify_len, gamma)


def classes_of(policy: PolicyConfig) -> tuple[ServiceClass, ...]:
    """The configured classes; their order is that of every `class_id`."""
    return tuple(
        ServiceClass(
            known.name,
            known.weight,
            None if known.max_tpot_ms is None else known.max_tpot_ms / 1000,
            known.min_verify_len,
            known.max_verify_len,
        )
        for known in policy.classes
    )


def worth_of(
    survivals: Float32, class_ids: Ids, classes: Sequence[ServiceClass], weights: Sequence[float]
) -> tuple[Float32, npt.NDArray[np.int64]]:
    """What each slot is worth [R, gamma], zero past the longest length, and the forced slots of each row [R].

    A row without a proposal (no survival at all) has nothing that could be forced.

    Args:
        weights: [C], the largest is 1.
    """
    gamma = survivals.shape[1]
    longest = np.array([c.longest(gamma) for c in classes])[class_ids]
    least = np.array([min(c.min_verify_len, gamma) for c in classes])[class_ids]
    worth = survivals * np.asarray(weights, np.float32)[class_ids][:, None]
    worth[np.arange(gamma) >= longest[:, None]] = 0.0
    return worth, np.where(survivals.any(axis=1), least, 0)


def allocate_classes(
    survivals: Float32,
    max_draft_tokens: int,
    min_worth: float,
    caps: npt.NDArray[np.integer],
    class_ids: Ids,
    classes: Sequence[ServiceClass],
    weights: Sequence[float],
) -> Int32:
    """`prefix_scheduler.allocate` by worth on one rank: forced slots first, never past a class's longest length."""
    worth, forced = worth_of(survivals, class_ids, classes, weights)
    position = np.arange(survivals.shape[1])
    ranked = np.where(position < forced[:, None], np.float32(1.0), worth)
    longest = np.array([c.longest(survivals.shape[1]) for c in classes])[class_ids]
    return allocate(ranked, max_draft_tokens, min_worth, np.minimum(caps, longest))


class ClassAllocation:
    """How a rank spends a budget on requests of several classes: a `verify_decision.AllocateClasses`.

    A budget that was planned with class weights has a worth for its price, and is spent by worth. One that knows no
    classes (the rank decided alone, or its group was left to it) has a survival for its price: the configured weights
    then only say who comes first while there is not enough for all, so nothing is left unused for the sake of a weight.
    """

    def __init__(self, classes: Sequence[ServiceClass]) -> None:
        assert classes
        self.classes = tuple(classes)
        heaviest = max(c.weight for c in classes)
        self._weights = tuple(c.weight / heaviest for c in classes)

    def longest(self, class_ids: Ids, gamma: int) -> Int32:
        """The most draft tokens each row may verify, [R]."""
        return np.array([c.longest(gamma) for c in self.classes], np.int32)[class_ids]

    def least(self, class_ids: Ids, gamma: int) -> Int32:
        """The draft tokens each row verifies whatever they are worth, [R]."""
        return np.array([min(c.min_verify_len, gamma) for c in self.classes], np.int32)[class_ids]

    def widen(
        self, choice: VerifyChoice, has_draft: Mask, class_ids: Ids, gamma: int
    ) -> VerifyChoice:
        """The choice with room for what is forced, which a plan without classes has not counted."""
        if choice.class_weights:
            return choice
        forced = int(self.least(class_ids, gamma)[has_draft].sum())
        return replace(choice, max_draft_tokens=max(choice.max_draft_tokens, forced))

    def __call__(
        self,
        survivals: Float32,
        max_draft_tokens: int,
        choice: VerifyChoice,
        caps: Int32,
        class_ids: Ids,
    ) -> Int32:
        """verify_len [R]."""
        price = choice.min_survival
        if not choice.class_weights:
            _, forced = worth_of(survivals, class_ids, self.classes, self._weights)
            reached = (survivals >= price).sum(axis=1)
            caps, price = np.minimum(caps, np.maximum(reached, forced)).astype(np.int32), 0.0
        weights = choice.class_weights or self._weights
        return allocate_classes(
            survivals, max_draft_tokens, price, caps, class_ids, self.classes, weights
        )
