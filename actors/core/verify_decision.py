"""How many draft tokens of each request a rank verifies in a step, and which rule said so.

The newest lawful `VerifyBudget` of the allocator decides K and lambda; without one the rank asks its own policy, which
sees survivals at least two steps old (C3). Inside the budget the current survivals are ranked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.core.budget_shelf import BudgetShelf
from actors.core.messages import VerifyBudget
from actors.core.step_decision import StepDecision, VerifyChoice

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_LAG_STEPS = 2


@dataclass(frozen=True)
class StepFacts:
    """What a policy may look at when it decides step `step`.

    `lagged_survivals` were current at `lagged_step <= step - 2`. `survivals` are those of this very step: only a rule
    that admits slots in the order of their survival and stops early may use them (Algorithm 1).
    """

    step: int
    survivals: Float32  # [R, gamma]; zeros without a draft
    caps: Int32  # [R] draft tokens a row can use
    lagged_step: int  # -1 when there are none
    lagged_survivals: Float32  # [R', gamma]
    num_prefill_tokens: int
    context_tokens: int


class VerifyPolicy(Protocol):
    """Decides for a rank that has no budget from the allocator."""

    def choose(self, facts: StepFacts) -> VerifyChoice: ...


@dataclass(frozen=True)
class DraftFacts:
    """What may be looked at when blocks are asked for, for the rounds of step `step`."""

    step: int
    num_askable: int  # rows that could use a block
    num_rounds: int  # all rows, those too
    num_other_tokens: int  # prefill tokens that share the step
    room: int  # draft tokens the step can hold


@dataclass(frozen=True)
class DraftChoice:
    """Which rows are asked, and what has changed with it: pause, probe, resume, or empty."""

    asks: Mask  # [num_askable]
    event: str = ""


class DraftPolicy(Protocol):
    """Decides whether drafting pays. `rule` is the reason given for rounds it asked no block for."""

    rule: str

    def note(self, step: int, survivals: Float32) -> None: ...

    def restart(self) -> None: ...

    def choose(self, facts: DraftFacts) -> DraftChoice: ...


class Allocate(Protocol):
    """Admit the K slots with the highest survival of at least lambda, prefix by prefix, never past a row's cap."""

    def __call__(
        self, survivals: Float32, max_draft_tokens: int, min_survival: float, caps: Int32
    ) -> Int32: ...


class AllocateClasses(Protocol):
    """`Allocate` for rows of several classes of service; see `service_class.ClassAllocation`."""

    def longest(self, class_ids: Int32, gamma: int) -> Int32: ...

    def least(self, class_ids: Int32, gamma: int) -> Int32: ...

    def widen(
        self, choice: VerifyChoice, has_draft: Mask, class_ids: Int32, gamma: int
    ) -> VerifyChoice: ...

    def __call__(
        self,
        survivals: Float32,
        max_draft_tokens: int,
        choice: VerifyChoice,
        caps: Int32,
        class_ids: Int32,
    ) -> Int32: ...


class VerifyDecider:
    """Turns survivals into verify lengths: the allocator's budget if a lawful one is there, else the local policy.

    `drafting` decides whether blocks are asked for at all; None: always. `classes` spends a budget on rows of several
    classes of service; None: all rows are alike.
    """

    def __init__(
        self,
        rank: str,
        epoch: str,
        policy: VerifyPolicy,
        allocate: Allocate,
        drafting: DraftPolicy | None = None,
        classes: AllocateClasses | None = None,
    ) -> None:
        self.budgets = BudgetShelf(rank, epoch)
        self.policy = policy
        self.drafting = drafting
        self._allocate = allocate
        self._classes = classes
        self._history: deque[tuple[int, Float32]] = deque(maxlen=_LAG_STEPS + 1)

    def decide(
        self,
        step: int,
        request_ids: tuple[str, ...],
        survivals: Float32,
        caps: Int32,
        has_draft: Mask,
        room: int,
        num_prefill_tokens: int,
        context_tokens: int,
        is_unasked: Mask | None = None,
        class_ids: Int32 | None = None,
        is_late: Mask | None = None,
    ) -> StepDecision:
        """Decide for the R rounds of a step.

        Args:
            survivals: [R, gamma] current ones, zeros without a draft.
            caps: [R] draft tokens a row can use: 0 without a draft, never past its last token.
            room: draft tokens the step has room for. It must not depend on current drafts (C3).
            is_unasked: [R] rows `choose_drafting` asked no block for; None: no row.
            class_ids: [R] index of the class of each row; None: all of the first.
            is_late: [R] rows whose block was asked for and has not come; None: no row.
        """
        ids = np.zeros(len(caps), np.int32) if class_ids is None else class_ids
        lagged_step, lagged = self._lagged(step, survivals.shape[1])
        facts = StepFacts(
            step, survivals, caps, lagged_step, lagged, num_prefill_tokens, context_tokens
        )
        choice = self._choose(facts, is_unasked)
        if has_draft.any():
            # A step without a block says nothing about survivals.
            self._history.append((step, survivals))
            if self.drafting is not None:
                self.drafting.note(step, survivals[has_draft])
        bounds, gamma = caps, survivals.shape[1]
        if choice.max_verify_len is not None:
            bounds = np.minimum(caps, np.int32(choice.max_verify_len))
        if self._classes is not None:
            bounds = np.minimum(bounds, self._classes.longest(ids, gamma))
            choice = self._classes.widen(choice, has_draft, ids, gamma)
        budget = min(choice.max_draft_tokens, room)
        if budget <= 0 or not bounds.any():
            verify_len = np.zeros(len(caps), np.int32)
        elif self._classes is not None:
            verify_len = self._classes(survivals, budget, choice, bounds, ids)
        else:
            verify_len = self._allocate(survivals, budget, choice.min_survival, bounds)
        return StepDecision(
            step, request_ids, survivals, caps, has_draft, verify_len, choice, room, is_unasked,
            bounds, ids, is_late,
        )  # fmt: skip

    def adopt(self, number: int, policy: VerifyPolicy, drafting: DraftPolicy | None) -> None:
        """Decide by another policy, from the next step on. Whoever orders that must not know the drafts (C3).

        Args:
            number: what budgets of the allocator must carry from now on.
        """
        self.budgets.adopt(number)
        self.policy, self.drafting = policy, drafting

    def choose_drafting(self, facts: DraftFacts) -> DraftChoice:
        """Whose blocks to ask for, for the step to come. Must be called before those blocks exist (C3)."""
        if self.drafting is None:
            return DraftChoice(np.ones(facts.num_askable, np.bool_))
        return self.drafting.choose(facts)

    def ahead(self, step: int, last: VerifyChoice) -> VerifyChoice:
        """How step `step` is decided, as far as that is known before its blocks exist (C3): by a budget that is here,
        else as the `last` step was."""
        budget = self.budgets.newest(step)
        return last if budget is None else _choice_of(budget)

    def forced(self, class_ids: Int32, gamma: int) -> Int32:
        """[R] draft tokens of rows of these classes that are verified whatever they are worth."""
        if self._classes is None:
            return np.zeros(len(class_ids), np.int32)
        return self._classes.least(class_ids, gamma)

    def new_drafter(self) -> None:
        """What was seen of earlier drafters says nothing about one that has just come."""
        if self.drafting is not None:
            self.drafting.restart()

    def _choose(self, facts: StepFacts, is_unasked: Mask | None) -> VerifyChoice:
        if not facts.caps.any():
            drafting = self.drafting
            has_unasked = is_unasked is not None and is_unasked.any()
            if drafting is not None and (drafting.rule == "none" or has_unasked):
                return VerifyChoice(0, 1.0, drafting.rule)
            return VerifyChoice(0, 1.0, "no_drafts")
        budget = self.budgets.newest(facts.step)
        if budget is not None:
            return _choice_of(budget)
        return self.policy.choose(facts)

    def _lagged(self, step: int, gamma: int) -> tuple[int, Float32]:
        """The newest survivals that may steer `step`, and the step they were current in."""
        for seen_at, survivals in reversed(self._history):
            if seen_at <= step - _LAG_STEPS:
                return seen_at, survivals
        return -1, np.zeros((0, gamma), np.float32)


def _choice_of(budget: VerifyBudget) -> VerifyChoice:
    most, price = budget.max_draft_tokens, budget.min_survival
    return VerifyChoice(most, price, budget.rule, class_weights=budget.class_weights)
