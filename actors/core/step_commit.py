"""From the result of a step to committed tokens: what each row adds to its stream, and which streams end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.core.acceptance import AcceptanceCounters
from actors.core.layout import StepPlan, StepResult
from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import Endpoint, TokenDelta
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.request import Request
from actors.core.row_table import Mask, RowTable
from actors.core.step_decision import StepDecision


@dataclass(frozen=True)
class StepInFlight:
    """The step the engine computes now. Its rows keep their slot and blocks until it is over, whatever happens."""

    plan: StepPlan
    rows: tuple[Request, ...]  # [R] the rounds first
    decision: StepDecision
    drafted: Drafted
    draft_wait_s: float  # time the rank stood waiting for proposals before it

    @property
    def num_rounds(self) -> int:
        return len(self.decision.verify_len)

    @property
    def num_prefill_tokens(self) -> int:
        return self.plan.batch_tokens - int(self.plan.cu_query_len[self.num_rounds])

    def holds(self, request: Request) -> bool:
        return any(row is request for row in self.rows)


@dataclass
class Commit:
    """What a step changed."""

    num_kept: npt.NDArray[
        np.int32
    ]  # [R] leading tokens of each row whose features its drafter gets
    num_new: npt.NDArray[np.int32]  # [R] tokens each row added to its stream
    num_accepted: npt.NDArray[np.int32]  # [R] draft tokens of each row, by the acceptance rule
    acceptance: AcceptanceCounters
    deltas: dict[Endpoint, list[TokenDelta]] = field(default_factory=dict)
    prefilled: list[Request] = field(default_factory=list)  # their prompts are done
    ended: list[Request] = field(default_factory=list)  # stop condition met in this step
    num_failed: int = 0  # of those, with an error
    num_undrafted: int = 0  # slots of blocks that their drafters left out
    aborted: list[Request] = field(default_factory=list)  # ended while the step was under way
    shared_time_s: float | None = None  # see `StepResult`

    @property
    def num_committed(self) -> int:
        return int(self.num_new.sum())


def commit_step(flight: StepInFlight, result: StepResult, table: RowTable) -> Commit:
    """Append the tokens of every live row to its request, in order, up to its first stop condition."""
    plan = flight.plan
    assert (result.num_accepted <= plan.verify_len).all(), "more accepted than scheduled"
    assert ((result.next_token >= 0) | ~plan.samples).all(), "a row that samples has no token"
    lives = np.array([not request.finished for request in flight.rows], np.bool_)
    # Of a round the anchor and the accepted tokens stay; of a prefill row the whole chunk.
    num_kept = np.diff(plan.cu_query_len) - plan.verify_len + result.num_accepted
    commit = Commit(
        np.zeros(plan.num_requests, np.int32),
        np.zeros(plan.num_requests, np.int32),
        result.num_accepted,
        AcceptanceCounters.zero(table.gamma),
        aborted=[request for request in flight.rows if request.finished],
        shared_time_s=result.shared_time_s,
    )
    for row in [row for row in result.errors if lives[row]]:
        lives[row] = False
        _fail(flight.rows[row], result.errors[row], commit)
    runs = _committed_runs(plan, result)
    for row in np.flatnonzero(lives).tolist():
        request = flight.rows[row]
        num_before = request.num_output
        if row < flight.num_rounds:
            _count_round(request, flight.decision, row)
        else:
            request.advance_prefill(int(num_kept[row]))
            if runs[row]:
                commit.prefilled.append(request)
        logprobs = result.logprobs.get(row, ())
        has_ended = bool(runs[row]) and _extend(request, row, runs[row], logprobs, commit)
        if request.log is not None and row < flight.num_rounds:
            num_new = int(commit.num_new[row])
            request.log.add(flight.decision, row, len(runs[row]) - 1, num_before, num_new)
        if has_ended:
            commit.ended.append(request)
            continue
        table.advance(request)
        if request.can_use_drafts:
            commit.num_kept[row] = num_kept[row]
    has_block = flight.decision.has_draft & lives[: flight.num_rounds]
    commit.num_undrafted = int((table.gamma - flight.decision.proposed_len)[has_block].sum())
    commit.acceptance = _acceptance(flight, lives[: flight.num_rounds], commit)
    return commit


def learn_from(calibration: RankCalibration, flight: StepInFlight, commit: Commit) -> list[str]:
    """What the rounds of a step teach; what is worth a line in a log."""
    decision, num_rounds = flight.decision, flight.num_rounds
    planned_len = decision.verify_len if decision.planned_len is None else decision.planned_len
    return calibration.learn(
        flight.drafted,
        planned_len,
        decision.verify_len,
        commit.num_accepted[:num_rounds],
        commit.num_new[:num_rounds],
    )


def _committed_runs(plan: StepPlan, result: StepResult) -> list[list[int]]:
    """Accepted draft tokens and the target's own token, for each row; empty in the middle of a prompt."""
    token_ids, starts = plan.token_ids.tolist(), plan.cu_query_len.tolist()
    accepted, own = result.num_accepted.tolist(), result.next_token.tolist()
    return [
        [*token_ids[starts[row] + 1 : starts[row] + 1 + accepted[row]], own[row]] if samples else []
        for row, samples in enumerate(plan.samples.tolist())
    ]


def _count_round(request: Request, decision: StepDecision, row: int) -> None:
    request.num_rounds += 1
    if decision.has_draft[row]:
        request.num_proposed += int(decision.proposed_len[row])
        request.num_scheduled += int(decision.verify_len[row])


def _extend(
    request: Request, row: int, run: list[int], logprobs: Sequence[TokenLogprobs], commit: Commit
) -> bool:
    """Append a run to its stream. Whether the stream ends with it."""
    emitted, reason = request.commit(run)
    # The last token of an uncut run is the target's own, the others were drafted.
    request.num_accepted += min(len(emitted), len(run) - 1)
    commit.num_new[row] = len(emitted)
    delta = request.delta(emitted, reason, logprobs=logprobs)
    commit.deltas.setdefault(request.admitted.reply_to, []).append(delta)
    return reason is not None


def _fail(request: Request, error: str, commit: Commit) -> None:
    delta = request.delta((), "error", error)
    commit.deltas.setdefault(request.admitted.reply_to, []).append(delta)
    commit.ended.append(request)
    commit.num_failed += 1


def _acceptance(flight: StepInFlight, lives: Mask, commit: Commit) -> AcceptanceCounters:
    """Counters of the rounds that were not aborted; the first token of a prompt is no round."""
    decision = flight.decision
    return AcceptanceCounters.of_step(
        decision.survivals[lives],
        decision.proposed_len[lives],
        decision.verify_len[lives],
        commit.num_accepted[: flight.num_rounds][lives],
        commit.num_committed - len(commit.prefilled),
    )
