"""What a rank tells others: the allocator after a step, and when nothing is left to run; its counts to whoever asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from actors.core.messages import Endpoint, StepReport
from actors.core.request_book import RequestBook
from actors.core.step_commit import Commit, StepInFlight

if TYPE_CHECKING:
    from actors.core.rank import Rank


def step_report(
    rank: Endpoint, book: RequestBook, flight: StepInFlight, commit: Commit, step_time_s: float
) -> StepReport:
    """`num_requests` counts the rounds: batch_tokens = num_requests + scheduled drafts + num_prefill_tokens."""
    decision = flight.decision
    return StepReport(
        rank=rank,
        step=flight.plan.step,
        step_time_s=step_time_s,
        draft_wait_s=flight.draft_wait_s,
        num_requests=flight.num_rounds,
        num_prefill_tokens=flight.num_prefill_tokens,
        batch_tokens=flight.plan.batch_tokens,
        context_tokens=int(flight.plan.context_len.sum()),
        survivals=decision.survivals,
        num_proposed=commit.acceptance.proposed,
        num_scheduled=commit.acceptance.scheduled,
        num_accepted=commit.acceptance.accepted,
        num_committed=commit.num_committed,
        num_free_blocks=book.pool.num_free,
        num_blocks=book.pool.num_blocks,
        num_waiting=len(book.waiting),
        budget_rule=decision.choice.rule,
        budget_used=int(decision.verify_len.sum()),
        class_ids=decision.class_ids,
        row_committed=commit.num_new[: flight.num_rounds],
        shared_time_s=commit.shared_time_s,
        max_running=book.table.num_slots,
    )


def idle_report(rank: Endpoint, book: RequestBook, step: int) -> StepReport:
    """The report of a step in which nothing ran."""
    gamma = book.table.gamma
    none = np.zeros(gamma, np.int64)
    return StepReport(
        rank=rank,
        step=step,
        step_time_s=0.0,
        draft_wait_s=0.0,
        num_requests=0,
        num_prefill_tokens=0,
        batch_tokens=0,
        context_tokens=0,
        survivals=np.zeros((0, gamma), np.float32),
        num_proposed=none,
        num_scheduled=none,
        num_accepted=none,
        num_committed=0,
        num_free_blocks=book.pool.num_free,
        num_blocks=book.pool.num_blocks,
        num_waiting=0,
        budget_rule="idle",
        budget_used=0,
        max_running=book.table.num_slots,
    )


def rank_stats(rank: Rank) -> dict[str, Any]:
    """Counts since this incarnation started, and what it holds now."""
    book, acceptance = rank.book, rank.counters.acceptance
    return {
        **{name: value for name, value in vars(rank.counters).items() if isinstance(value, int)},
        "acceptance_length": acceptance.acceptance_length if acceptance.num_rounds else None,
        "num_running": int(book.table.is_running.sum()) + len(book.prefilling),
        "max_running": rank.limits.max_running,
        "max_waiting": rank.limits.max_waiting,
        "num_waiting": len(book.waiting),
        "num_reservations": book.desk.num_reservations,
        "num_free_blocks": book.pool.num_free,
        "num_blocks": book.pool.num_blocks,
        "num_cached_blocks": book.pool.num_unused,
        "num_prefix_hits": book.cache.num_hits,
        "num_prefix_asked_tokens": book.cache.num_asked_tokens,
        "num_prefix_hit_tokens": book.cache.num_hit_tokens,
        "num_prefix_evictions": book.pool.num_evicted,
        "step_time_s": rank.step_time_s,
        "is_idle": rank.is_idle,
        "calibration": rank.calibration.view(),
        "num_budgets_refused": rank.decider.budgets.num_refused,
        "last_rule": rank.report.budget_rule if rank.report else "",
    }
