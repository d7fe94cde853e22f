"""The budgets a rank has received, and which of them may be used in a step (contract C3)."""

from __future__ import annotations

from collections import deque

from actors.core.messages import VerifyBudget

_LAG_STEPS = 2
_KEPT_BUDGETS = 16


class BudgetShelf:
    """Budgets received for one incarnation of a rank, planned under the policy it follows now."""

    def __init__(self, rank: str, epoch: str) -> None:
        self._rank = rank
        self._epoch = epoch
        self._budgets: deque[VerifyBudget] = deque(maxlen=_KEPT_BUDGETS)
        self.num_refused = 0
        self._policy_number = 0

    def adopt(self, policy_number: int) -> None:
        """Another policy is in force: what was planned under the last one is void, wherever it still is."""
        self._policy_number = policy_number
        self._budgets.clear()

    def offer(self, budget: VerifyBudget, step: int) -> None:
        """Keep a budget that can still apply at `step` or later. Others are refused and counted.

        The lag is checked again: a message that was unpickled has not run its own check.
        """
        lawful = (
            budget.rank == self._rank
            and budget.epoch == self._epoch
            and budget.policy_number == self._policy_number
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
