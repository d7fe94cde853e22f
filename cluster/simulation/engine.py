"""The event loop: arrivals, and lockstep steps of every group, in the order of simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from actors.core.messages import StepReport
from cluster.simulation.arrivals import Arrivals, JobSource
from cluster.simulation.machine import Hardware
from cluster.simulation.policies import GroupPolicy
from cluster.simulation.ranks import SimulatedRank
from cluster.simulation.recorder import Recorder, Result, StepRecord
from cluster.simulation.scenario import Closed, Open, Scenario, System
from cluster.simulation.traces import Trace, build

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

ARRIVAL = -1
Progress = Callable[[int], None]


class Group:
    """One lockstep group: its ranks, its policy, and the step it is in."""

    def __init__(
        self,
        scenario: Scenario,
        system: System,
        traces: list[Trace],
        index: int,
        seed: int,
        counts_rounds: bool,
    ) -> None:
        machine = scenario.machine
        self.hardware = Hardware.of(machine, system.gamma, system.drafting)
        self.policy = GroupPolicy(system, self.hardware, scenario, index)
        self.ranks = [
            SimulatedRank(traces, system.gamma, counts_rounds)
            for _ in range(machine.ranks_per_group)
        ]
        self.machine, self.system = machine, system
        self.num_tenants = len(scenario.tenants)
        self.step = 0
        self.is_stepping = False
        self._noise = np.random.default_rng((seed, index))

    def run_step(self, now: float) -> tuple[StepRecord, list[Int64]]:
        """One step of all ranks; what it did, and the rows of each rank that have finished with it."""
        n = len(self.ranks)
        record = StepRecord.empty(n, now)
        pending: list[tuple[npt.NDArray[np.intp], Int64]] = []
        shown: list[Float32] = []
        for at, rank in enumerate(self.ranks):
            rank.admit(self.machine.max_requests)
            prefill = rank.prefill_step(self.machine.max_prefill_tokens)
            rows = rank.decoding()
            survivals, confidences, luck = rank.draws(rows)
            caps = rank.caps(rows)
            lens = self.policy.decide(
                at, self.step, survivals, caps, rank.tenant[rows], prefill, int(rank.context.sum())
            )
            scheduled = np.arange(self.system.gamma) < lens[:, None]
            accepted = np.logical_and.accumulate((luck < confidences) & scheduled, axis=1)
            committed = 1 + accepted.sum(axis=1, dtype=np.int64)
            expected = 1.0 + np.where(scheduled, survivals, 0.0).sum(axis=1, dtype=np.float64)
            record.add_rank(at, rank, rows, lens, committed, expected, prefill)
            pending.append((rows, committed))
            shown.append(survivals)
        record.step_time_s = self._step_time_s(record)
        self._commit(record, pending)
        self.policy.served(*record.by_tenant(self.num_tenants), record.step_time_s)
        self._report(record, shown)
        self.step += 1
        return record, [rank.finished() for rank in self.ranks]

    def _step_time_s(self, record: StepRecord) -> float:
        exact = self.hardware.step_time_s(
            record.num_requests, record.batch_tokens, self.system.pad_to_max
        )
        noise = self.machine.noise
        return exact * float(np.exp(noise * self._noise.standard_normal())) if noise else exact

    def _commit(
        self, record: StepRecord, pending: list[tuple[npt.NDArray[np.intp], Int64]]
    ) -> None:
        for rank, (rows, committed) in zip(self.ranks, pending, strict=True):
            rank.commit(rows, committed, record.started_s + record.step_time_s)

    def _report(self, record: StepRecord, shown: list[Float32]) -> None:
        zeros = np.zeros(self.system.gamma, np.int64)
        reports = [
            StepReport(
                rank=endpoint,
                step=self.step,
                step_time_s=record.step_time_s,
                draft_wait_s=0.0,
                num_requests=int(record.num_requests[at]),
                num_prefill_tokens=int(record.prefill_tokens[at]),
                batch_tokens=int(record.batch_tokens[at]),
                context_tokens=int(self.ranks[at].context.sum()),
                survivals=shown[at],
                num_proposed=np.full(self.system.gamma, record.num_requests[at], np.int64),
                num_scheduled=zeros,
                num_accepted=zeros,
                num_committed=int(record.committed[at]),
                num_free_blocks=0,
                num_blocks=0,
                num_waiting=len(self.ranks[at].waiting),
                budget_rule="",
                budget_used=int(record.scheduled[at]),
                class_ids=record.tenants[at][0].astype(np.int32),
            )
            for at, endpoint in enumerate(self.policy.ranks)
        ]
        self.policy.reported(reports, record.started_s + record.step_time_s)


class Simulation:
    """One system under one load."""

    def __init__(self, scenario: Scenario, system: System, load: Closed | Open, seed: int) -> None:
        self._scenario, self._load = scenario, load
        traces = [
            build(system.acceptance or tenant.acceptance, system.gamma, seed + 31 * at)
            for at, tenant in enumerate(scenario.tenants)
        ]
        machine = scenario.machine
        counts_rounds = isinstance(load, Closed) and load.lifetime == "rounds"
        self._groups = [
            Group(scenario, system, traces, index, seed, counts_rounds)
            for index in range(machine.num_groups)
        ]
        self._jobs = JobSource(scenario, seed)
        self._recorder = Recorder(scenario, system)
        self._heap: list[tuple[float, int, int]] = []
        self._order = itertools.count()

    def run(self, progress: Progress | None = None) -> Result:
        """Until every group has run its measured steps, or nothing is left to do."""
        measure = self._scenario.measure
        wanted = (measure.warmup_steps + measure.steps) * len(self._groups)
        feed = self._start()
        done = 0
        while self._heap and done < wanted:
            now, _, index = heapq.heappop(self._heap)
            if index == ARRIVAL:
                self._arrive(now, feed)
                continue
            group = self._groups[index]
            group.is_stepping = False
            if any(rank.load for rank in group.ranks):
                done += 1
                self._run_group(index, now)
                if progress:
                    progress(1)
        return self._recorder.result()

    def _start(self) -> Arrivals | None:
        if isinstance(self._load, Open):
            feed = Arrivals(self._scenario, self._load, self._jobs)
            self._schedule_arrival(feed)
            return feed
        per_rank = self._load.requests_per_rank
        n = self._scenario.machine.ranks_per_group
        for index, group in enumerate(self._groups):
            for at, rank in enumerate(group.ranks):
                wanted = per_rank if isinstance(per_rank, int) else per_rank[at % len(per_rank)]
                rank.waiting.extend(self._jobs.next(index * n + at, 0.0) for _ in range(wanted))
            self._wake(index, 0.0)
        return None

    def _run_group(self, index: int, now: float) -> None:
        group = self._groups[index]
        record, finished = group.run_step(now)
        end = now + record.step_time_s
        measured = group.step > self._scenario.measure.warmup_steps
        for at, (rank, rows) in enumerate(zip(group.ranks, finished, strict=True)):
            if measured:
                self._recorder.finished(rank, rows, end)
            rank.drop(rows)
            if isinstance(self._load, Closed):
                rank.waiting.extend(
                    self._jobs.next(index * len(group.ranks) + at, end) for _ in rows
                )
        if measured:
            self._recorder.step(record)
        self._wake(index, end)

    def _wake(self, index: int, at: float) -> None:
        if not self._groups[index].is_stepping:
            self._groups[index].is_stepping = True
            heapq.heappush(self._heap, (at, next(self._order), index))

    def _schedule_arrival(self, feed: Arrivals) -> None:
        at = feed.next_time()
        if at is not None:
            heapq.heappush(self._heap, (at, next(self._order), ARRIVAL))

    def _arrive(self, now: float, feed: Arrivals | None) -> None:
        assert feed is not None
        job, rank = feed.take(now, [r.load for g in self._groups for r in g.ranks])
        group, at = divmod(rank, self._scenario.machine.ranks_per_group)
        self._groups[group].ranks[at].waiting.append(job)
        self._wake(group, now)
        self._schedule_arrival(feed)
