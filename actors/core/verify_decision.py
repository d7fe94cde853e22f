"""How many draft tokens of each request a rank verifies in a step, and which rule said so.

The newest lawful `VerifyBudget` of the allocator decides K and lambda; without one the rank asks its own policy, which
sees survivals at least two steps old (C3). Inside the budget the current survivals are ranked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from actors.core.messages import VerifyBudget

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

CutRule = Literal[
    "none", "unasked", "fallback", "length", "policy_length", "price", "room", "budget"
]

_LAG_STEPS = 2
_KEPT_BUDGETS = 16


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


@dataclass(frozen=True)
class VerifyChoice:
    """K and lambda for one step, and the rule behind them. `max_verify_len` also bounds every single row."""

    max_draft_tokens: int  # K
    min_survival: float  # lambda
    rule: str
    max_verify_len: int | None = None


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


class BudgetShelf:
    """Budgets received for one incarnation of a rank."""

    def __init__(self, rank: str, epoch: str) -> None:
        self._rank = rank
        self._epoch = epoch
        self._budgets: deque[VerifyBudget] = deque(maxlen=_KEPT_BUDGETS)
        self.num_refused = 0

    def offer(self, budget: VerifyBudget, step: int) -> None:
        """Keep a budget that can still apply at `step` or later. Others are refused and counted.

        The lag is checked again: a message that was unpickled has not run its own check.
        """
        lawful = (
            budget.rank == self._rank
            and budget.epoch == self._epoch
            and budget.based_on_step <= budget.for_step - _LAG_STEPS
            and budget.expires_step >= step
        )
        if lawful:
            self._budgets.append(budget)
        else:
            self.num_refused += 1

    def newest(self, step: int) -> VerifyBudget | None:
        """The lawful budget for `step` with the freshest basis."""
        lawful = [b for b in self._budgets if b.for_step <= step <= b.expires_step]
        return max(lawful, key=lambda b: (b.based_on_step, b.for_step), default=None)


@dataclass(frozen=True)
class StepDecision:
    """What was decided for the R rounds of one step, and enough to say why (C11)."""

    step: int
    request_ids: tuple[str, ...]  # [R]
    survivals: Float32  # [R, gamma], zeros without a draft
    caps: Int32  # [R] draft tokens a row could use
    has_draft: Mask  # [R]
    verify_len: Int32  # [R] scheduled
    choice: VerifyChoice
    room: int  # draft tokens the step could hold
    is_unasked: Mask | None = None  # [R] no block was asked for: drafting did not pay; None: nobody

    @property
    def most_draft_tokens(self) -> int:
        """Draft tokens the lagged budget could have scheduled, whatever the current survivals."""
        return max(0, min(self.choice.max_draft_tokens, self.room, self.survivals.size))

    def cut_by(self, row: int) -> CutRule:
        """Which rule ended the verified prefix of a row; "fallback" when it had no draft although it could be.

        "unasked" says that the rank has asked for none on purpose.
        """
        length, gamma = int(self.verify_len[row]), self.survivals.shape[1]
        if not self.has_draft[row]:
            is_unasked = self.is_unasked is not None and bool(self.is_unasked[row])
            return "unasked" if is_unasked else "fallback"
        if length == gamma:
            return "none"
        if length == int(self.caps[row]):
            return "length"
        if length == self.choice.max_verify_len:
            return "policy_length"
        if self.survivals[row, length] < self.choice.min_survival:
            return "price"
        return "room" if self.room < self.choice.max_draft_tokens else "budget"


class VerifyDecider:
    """Turns survivals into verify lengths: the allocator's budget if a lawful one is there, else the local policy.

    `drafting` decides whether blocks are asked for at all; None: always.
    """

    def __init__(
        self,
        rank: str,
        epoch: str,
        policy: VerifyPolicy,
        allocate: Allocate,
        drafting: DraftPolicy | None = None,
    ) -> None:
        self.budgets = BudgetShelf(rank, epoch)
        self.policy = policy
        self.drafting = drafting
        self._allocate = allocate
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
    ) -> StepDecision:
        """Decide for the R rounds of a step.

        Args:
            survivals: [R, gamma] current ones, zeros without a draft.
            caps: [R] draft tokens a row can use: 0 without a draft, never past its last token.
            room: draft tokens the step has room for. It must not depend on current drafts (C3).
            is_unasked: [R] rows `choose_drafting` asked no block for; None: no row.
        """
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
        budget = min(choice.max_draft_tokens, room)
        bounds = caps
        if choice.max_verify_len is not None:
            bounds = np.minimum(caps, np.int32(choice.max_verify_len))
        if budget > 0 and bounds.any():
            verify_len = self._allocate(survivals, budget, choice.min_survival, bounds)
        else:
            verify_len = np.zeros(len(caps), np.int32)
        return StepDecision(
            step, request_ids, survivals, caps, has_draft, verify_len, choice, room, is_unasked
        )

    def choose_drafting(self, facts: DraftFacts) -> DraftChoice:
        """Whose blocks to ask for, for the step to come. Must be called before those blocks exist (C3)."""
        if self.drafting is None:
            return DraftChoice(np.ones(facts.num_askable, np.bool_))
        return self.drafting.choose(facts)

    def new_drafter(self) -> None:
        """What was seen of earlier drafters says nothing about one that has just come."""
        if self.drafting is not None:
            self.drafting.restart()

    def _choose(self, facts: StepFacts, is_unasked: Mask | None) -> VerifyChoice:
        if not facts.caps.any():
            rule = "no_drafts"
            if self.drafting is not None and is_unasked is not None and is_unasked.any():
                rule = self.drafting.rule
            return VerifyChoice(0, 1.0, rule)
        budget = self.budgets.newest(facts.step)
        if budget is not None:
            return VerifyChoice(budget.max_draft_tokens, budget.min_survival, budget.rule)
        return self.policy.choose(facts)

    def _lagged(self, step: int, gamma: int) -> tuple[int, Float32]:
        """The newest survivals that may steer `step`, and the step they were current in."""
        for seen_at, survivals in reversed(self._history):
            if seen_at <= step - _LAG_STEPS:
                return seen_at, survivals
        return -1, np.zeros((0, gamma), np.float32)
