"""The requests of one simulated rank, as columns, and the queue before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.simulation.traces import Trace

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Job:
    """One request to come."""

    request_id: int
    tenant: int
    prompt_tokens: int
    output_tokens: int
    context_tokens: int
    arrived_s: float


def _empty() -> Int64:
    return np.zeros(0, np.int64)


@dataclass
class SimulatedRank:
    """Columns are [R], in order of arrival."""

    traces: list[Trace]  # of each tenant
    gamma: int
    counts_rounds: bool = False  # a request lives for a number of rounds, not of tokens
    waiting: deque[Job] = field(default_factory=deque)
    ids: Int64 = field(default_factory=_empty)
    tenant: Int64 = field(default_factory=_empty)
    remaining: Int64 = field(default_factory=_empty)  # output tokens still to come
    prefill: Int64 = field(default_factory=_empty)  # prompt tokens still to be computed
    context: Int64 = field(default_factory=_empty)
    rounds: Int64 = field(default_factory=_empty)
    output: Int64 = field(default_factory=_empty)
    arrived_s: Float64 = field(default_factory=lambda: np.zeros(0))
    first_s: Float64 = field(
        default_factory=lambda: np.zeros(0)
    )  # time of the first token, nan before

    @property
    def num_running(self) -> int:
        return len(self.ids)

    @property
    def load(self) -> int:
        return len(self.ids) + len(self.waiting)

    def admit(self, most: int) -> None:
        """Let waiting requests in, up to `most` running ones."""
        room = min(most - len(self.ids), len(self.waiting))
        if room <= 0:
            return
        jobs = [self.waiting.popleft() for _ in range(room)]
        self.ids = np.append(self.ids, [job.request_id for job in jobs])
        self.tenant = np.append(self.tenant, [job.tenant for job in jobs])
        self.remaining = np.append(self.remaining, [job.output_tokens for job in jobs])
        self.prefill = np.append(self.prefill, [job.prompt_tokens for job in jobs])
        self.context = np.append(self.context, [job.context_tokens for job in jobs])
        self.rounds = np.append(self.rounds, np.zeros(room, np.int64))
        self.output = np.append(self.output, [job.output_tokens for job in jobs])
        self.arrived_s = np.append(self.arrived_s, [job.arrived_s for job in jobs])
        self.first_s = np.append(self.first_s, np.full(room, np.nan))

    def prefill_step(self, most: int) -> int:
        """Compute up to `most` prompt tokens, oldest request first; how many it were."""
        if not self.prefill.any():
            return 0
        before = np.cumsum(self.prefill) - self.prefill
        done = np.clip(most - before, 0, self.prefill)
        self.prefill = self.prefill - done
        self.context = self.context + done
        return int(done.sum())

    def decoding(self) -> npt.NDArray[np.intp]:
        """Rows in a round: their prompt is computed."""
        return np.flatnonzero(self.prefill == 0)

    def caps(self, rows: npt.NDArray[np.intp]) -> Int32:
        """Draft tokens each row can use: never past its last token."""
        if self.counts_rounds:
            return np.full(len(rows), self.gamma, np.int32)
        return np.minimum(self.gamma, self.remaining[rows] - 1).astype(np.int32)

    def draws(self, rows: npt.NDArray[np.intp]) -> tuple[Float32, Float32, Float32]:
        """Survivals, confidences and luck of the present round of these rows, [r, gamma] each."""
        shape = (len(rows), self.gamma)
        survivals, confidences = np.empty(shape, np.float32), np.empty(shape, np.float32)
        luck = np.empty(shape, np.float32)
        for tenant, trace in enumerate(self.traces):
            own = np.flatnonzero(self.tenant[rows] == tenant)
            if len(own):
                at = trace.rows(self.ids[rows[own]], self.rounds[rows[own]])
                survivals[own] = trace.survivals[at]
                confidences[own] = trace.confidences[at]
                luck[own] = trace.luck[at]
        return survivals, confidences, luck

    def commit(self, rows: npt.NDArray[np.intp], tokens: Int64, now: float) -> None:
        self.remaining[rows] -= 1 if self.counts_rounds else tokens
        self.context[rows] += tokens
        self.rounds[rows] += 1
        started = rows[np.isnan(self.first_s[rows])]
        self.first_s[started] = now

    def finished(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.remaining <= 0)

    def drop(self, rows: npt.NDArray[np.intp]) -> None:
        keep = np.ones(len(self.ids), bool)
        keep[rows] = False
        for name in ("ids", "tenant", "remaining", "prefill", "context", "rounds", "output"):
            setattr(self, name, getattr(self, name)[keep])
        self.arrived_s, self.first_s = self.arrived_s[keep], self.first_s[keep]
