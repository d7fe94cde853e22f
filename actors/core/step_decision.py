"""What was decided for the rounds of a step: how much of each block is verified, and enough to say why (C11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

CutRule = Literal[
    "none",  # the whole block was verified
    "budget",  # K
    "price",  # lambda
    "cold",  # the price of a rank that has seen no survivals yet
    "room",  # of the step
    "length",  # the end of the stream is near
    "blocks",  # its KV blocks have room for no more
    "policy_length",
    "undrafted",  # its drafter stopped there: what follows was worth less than a share of the price
    "unasked",  # no block: none was asked for, drafting did not pay
    "late",  # no block: it was asked for and has not come
    "off",  # no block: the request, or the policy, speculates on nothing
    "fallback",  # no block: there is nobody to ask
]


@dataclass(frozen=True)
class VerifyChoice:
    """K and lambda for one step, and the rule behind them. `max_verify_len` also bounds every single row."""

    max_draft_tokens: int  # K
    min_survival: float  # lambda
    rule: str
    max_verify_len: int | None = None
    class_weights: tuple[float, ...] = ()  # [C] lambda is a worth then, survival times weight


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
    bounds: Int32 | None = None  # [R] caps, and what policy and class allow; None: the caps
    class_ids: Int32 | None = None  # [R] None: all of the first class
    is_late: Mask | None = None  # [R] a block was asked for and has not come; None: nobody
    planned_len: Int32 | None = None  # [R] what the budget alone gave; None: `verify_len`
    num_reserved: int = 0  # draft tokens set aside for explored rows, beside the budget
    lacks_blocks: Mask | None = None  # [R] its cap is what its KV blocks have room for
    drafted_len: Int32 | None = None  # [R] slots its drafter drafted; None: whole blocks

    @property
    def most_draft_tokens(self) -> int:
        """Draft tokens the lagged budget could have scheduled, whatever the current survivals."""
        within_budget = min(self.choice.max_draft_tokens, self.room, self.survivals.size)
        return max(0, within_budget) + self.num_reserved

    @property
    def proposed_len(self) -> Int32:
        """[R] draft tokens proposed: those that were drafted. What stands in for the rest of a block is nobody's."""
        whole = np.where(self.has_draft, self.survivals.shape[1], 0).astype(np.int32)
        return whole if self.drafted_len is None else np.minimum(whole, self.drafted_len)

    def is_explored(self, row: int) -> bool:
        """Whether it was verified further than the budget asked, to see what becomes of such slots."""
        return self.planned_len is not None and bool(self.verify_len[row] > self.planned_len[row])

    def cut_by(self, row: int) -> CutRule:
        """Which rule ended the verified prefix of a row, or why it had no block to verify."""
        length, gamma = int(self.verify_len[row]), self.survivals.shape[1]
        if not self.has_draft[row]:
            if self.is_unasked is not None and self.is_unasked[row]:
                return "unasked"
            return "late" if self.is_late is not None and self.is_late[row] else "fallback"
        if length == gamma:
            return "none"
        if length == int(self.caps[row]):
            lacking = self.lacks_blocks is not None and self.lacks_blocks[row]
            return "blocks" if lacking else "length"
        if self.bounds is not None and length == int(self.bounds[row]):
            return "policy_length"
        if length == int(self.proposed_len[row]):
            return "undrafted"
        if self.survivals[row, length] * self._weight(row) < self.choice.min_survival:
            return "cold" if self.choice.rule == "cold" else "price"
        return "room" if self.room < self.choice.max_draft_tokens else "budget"

    def _weight(self, row: int) -> float:
        """What turns the survivals of a row into what the price is compared with."""
        weights = self.choice.class_weights
        return weights[self.class_ids[row]] if weights and self.class_ids is not None else 1.0
