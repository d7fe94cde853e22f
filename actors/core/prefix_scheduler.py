"""Which prefixes are verified: Algorithm 1, lagged budgets, and the static policies (paper sections 3.2 and 5).

Contract C3: whether slot (r, k) is verified may depend on x_{r,<k} and on anything older, never on x_{r,>=k}. A
survival a_{r,k} is a function of x_{r,<k}; so a slot may be judged by its own survival and by slots that come before
it in the order below, and by nothing else of the current step that contains its own request's later slots.

The order is: larger survival first; ties to the earlier position, then to the earlier arrival. It respects prefixes
because survivals never increase along a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from actors.core.messages import AnticipatingBudgetError
from actors.core.sps import RankTimes
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import StepFacts

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

LAG_STEPS = 2
MIN_SURVIVAL = 1e-6
COLD_PRICE = (
    0.5  # lowest survival verified when nothing is measured yet: more likely accepted than not
)
UNLIMITED = 2**31 - 1


class StepTimes(Protocol):
    """Seconds of a complete round: `CostCurve`, or `RankTimes`, which corrects one."""

    def step_time_s_at(self, num_requests: int, batch_tokens: npt.ArrayLike) -> Float64: ...


@dataclass(frozen=True)
class Budget:
    """The result of a search: at most K draft tokens, each with a survival of at least the price."""

    max_draft_tokens: int  # K
    min_survival: float  # lambda
    rule: str
    class_weights: tuple[float, ...] = ()  # lambda is a worth then; see `VerifyBudget`


def allocate(
    survivals: Float32,
    max_draft_tokens: int,
    min_survival: float,
    caps: npt.NDArray[np.integer],
    arrival: npt.NDArray[np.integer] | None = None,
) -> Int32:
    """The `max_draft_tokens` largest survivals of at least `min_survival`, as verify_len [R].

    Args:
        survivals: [R, gamma] of the current step.
        caps: [R] longest verify_len allowed for each request. A cap may not depend on the draft tokens it cuts.
        arrival: [R] order of arrival; None means the rows are in that order.
    """
    assert (survivals[:, 1:] <= survivals[:, :-1]).all(), "survivals increase along a row"
    position = np.arange(survivals.shape[1])
    eligible = (survivals >= min_survival) & (position < np.asarray(caps)[:, None])
    if int(eligible.sum()) > max(max_draft_tokens, 0):
        ranked = _ranked(survivals, eligible, arrival)[: max(max_draft_tokens, 0)]
        eligible = np.zeros_like(eligible)
        eligible.flat[ranked] = True
    verify_len: Int32 = eligible.sum(axis=1, dtype=np.int32)
    return verify_len


def _ranked(
    survivals: Float32, eligible: npt.NDArray[np.bool_], arrival: npt.NDArray[np.integer] | None
) -> npt.NDArray[np.intp]:
    """Flat indices of the eligible slots in the order of this module. lexsort's last key is the first one."""
    flat = np.flatnonzero(eligible)
    row, position = np.divmod(flat, survivals.shape[1])
    came = row if arrival is None else np.asarray(arrival)[row]
    return flat[np.lexsort((came, position, -survivals.flat[flat]))]


def search(
    stale_survivals: Float32,
    times: StepTimes,
    num_other_tokens: int = 0,
    min_predicted_gain: float = 0.0,
) -> Budget:
    """The budget that maximises expected tokens over time, searched over the whole jagged curve.

    The search looks at every slot at once, so its result depends on all tokens behind `stale_survivals`. It is only
    lawful for steps at least two later (C3); `VerifyBudget` holds that.

    The price is what a token must bring to pay for its time at the optimum: the best throughput times the cost of
    the last tokens admitted. It is low on the tread of a staircase (fill it) and high on a slope.

    Args:
        stale_survivals: [R, gamma], rows of zeros for requests without a proposal.
        num_other_tokens: prefill tokens that share the step.
        min_predicted_gain: relative gain over verifying nothing below which the budget is zero.
    """
    num_requests = len(stale_survivals)
    if not num_requests:
        return Budget(0, 1.0, "idle")
    ranked = np.sort(stale_survivals[stale_survivals >= MIN_SURVIVAL].astype(np.float64))[::-1]
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(ranked)])
    counts = np.arange(len(tokens))
    time = times.step_time_s_at(num_requests, num_requests + num_other_tokens + counts)
    throughput = tokens / time
    best = int(throughput.argmax())
    if best == 0 or throughput[best] < (1.0 + min_predicted_gain) * throughput[0]:
        return Budget(0, 1.0, "lagged" if best == 0 else "low_gain")
    window = max(1, best // 8)
    marginal = float(throughput[best] * (time[best] - time[best - window]) / window)
    price = min(max(marginal, MIN_SURVIVAL), float(ranked[best - 1]))
    return Budget(best, price, "lagged")


def early_stop(
    survivals: Float32,
    caps: npt.NDArray[np.integer],
    times: StepTimes,
    num_other_tokens: int = 0,
    arrival: npt.NDArray[np.integer] | None = None,
) -> Int32:
    """Algorithm 1 of the paper: admit slots in order while throughput rises, stop at the first that does not raise it.

    Stopping at once, instead of looking for a later maximum, is what makes it lawful on current survivals: no slot
    is judged by a slot that comes after it.
    """
    num_requests, gamma = survivals.shape
    eligible = (survivals >= MIN_SURVIVAL) & (np.arange(gamma) < np.asarray(caps)[:, None])
    ranked = _ranked(survivals, eligible, arrival)
    tokens = num_requests + np.concatenate(
        [[0.0], np.cumsum(survivals.flat[ranked].astype(np.float64))]
    )
    counts = np.arange(len(tokens))
    throughput = tokens / times.step_time_s_at(
        num_requests, num_requests + num_other_tokens + counts
    )
    rises = np.diff(throughput) > 0
    admitted = ranked[: int(np.logical_and.accumulate(rises).sum())]
    chosen = np.zeros(survivals.shape, bool)
    chosen.flat[admitted] = True
    verify_len: Int32 = chosen.sum(axis=1, dtype=np.int32)
    return verify_len


# --- one interface: `verify_decision.VerifyPolicy` -------------------------------------------------------------------


def lagged_budget(
    stale_survivals: Float32,
    times: RankTimes,
    num_other_tokens: int = 0,
    min_predicted_gain: float = 0.0,
) -> Budget:
    """`search`, or a plain price where the curve cannot carry a search; the rule says which and why.

    A flat curve would pin the search to "verify everything"; one that served times contradict would pin it anywhere.
    """
    if not len(stale_survivals):
        return Budget(0, 1.0, "idle")
    if times.doubt:
        return Budget(UNLIMITED, COLD_PRICE, times.doubt)
    return search(stale_survivals, times, num_other_tokens, min_predicted_gain)


@dataclass(frozen=True)
class NoSpeculation:
    """Verifies nothing."""

    def choose(self, facts: StepFacts) -> VerifyChoice:
        assert facts.step >= 0
        return VerifyChoice(0, 1.0, "none")


@dataclass(frozen=True)
class StaticLength:
    """The same number of slots for every request, whatever their survivals."""

    length: int

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return VerifyChoice(facts.survivals.size, 0.0, "static_length", self.length)


@dataclass(frozen=True)
class StaticThreshold:
    """Every slot whose survival reaches a threshold."""

    threshold: float

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return VerifyChoice(facts.survivals.size, self.threshold, "static_threshold")


@dataclass(frozen=True)
class Algorithm1:
    """Synchronous early stop on current survivals. Its K admits exactly the slots it admitted itself."""

    times: RankTimes

    def choose(self, facts: StepFacts) -> VerifyChoice:
        if self.times.doubt:
            return VerifyChoice(facts.survivals.size, COLD_PRICE, self.times.doubt)
        lens = early_stop(facts.survivals, facts.caps, self.times, facts.num_prefill_tokens)
        return VerifyChoice(int(lens.sum()), MIN_SURVIVAL, "algorithm1")


@dataclass(frozen=True)
class Lagged:
    """The budget that the survivals of two or more steps ago ask for."""

    times: RankTimes
    min_predicted_gain: float = 0.0

    def choose(self, facts: StepFacts) -> VerifyChoice:
        if facts.lagged_step < 0:
            return VerifyChoice(facts.survivals.size, COLD_PRICE, "cold")
        if facts.lagged_step > facts.step - LAG_STEPS:
            raise AnticipatingBudgetError(
                f"lagged_step={facts.lagged_step} used in step {facts.step}: a budget may only use survivals at "
                "least two steps old; keep them until then"
            )
        budget = lagged_budget(
            facts.lagged_survivals, self.times, facts.num_prefill_tokens, self.min_predicted_gain
        )
        return VerifyChoice(budget.max_draft_tokens, budget.min_survival, f"local_{budget.rule}")
