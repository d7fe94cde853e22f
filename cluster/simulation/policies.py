"""The decisions of one simulated lockstep group, taken by the code that serves: deciders, local policies, allocator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from actors.core.capacity import Allocator
from actors.core.classes import ClassPrices
from actors.core.group_times import split_profiles
from actors.core.local_policy import LocalPolicy
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, StepReport
from actors.core.prefix_scheduler import allocate
from actors.core.service_class import ClassAllocation, ServiceClass
from actors.core.sps import CostCurve
from actors.core.verify_decision import VerifyDecider
from cluster.simulation.machine import Hardware
from cluster.simulation.scenario import Scenario, System

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

UNLIMITED = 2**31 - 1


class GroupPolicy:
    """Every rank decides as a served one does; with `joint`, the allocator sends it budgets two steps ahead."""

    def __init__(self, system: System, hardware: Hardware, scenario: Scenario, group: int) -> None:
        self.system = system
        self.tenants = scenario.tenants
        n = len(hardware.speed)
        self.ranks = [
            Endpoint(f"group-{group}-rank-{rank}", "target", "", "", "simulated")
            for rank in range(n)
        ]
        self._locals: list[LocalPolicy] = []
        joint = system.policy == "joint"
        together = CostCurve.of(hardware.profile(self.ranks[0], n))
        for _ in self.ranks:
            policy = LocalPolicy(
                system.policy,
                static_length=system.length,
                static_threshold=system.threshold,
                min_predicted_gain=system.min_predicted_gain,
            )
            policy.times.measured(together)
            self._locals.append(policy)
        self.prices: ClassPrices | None = None
        self.solver: JointSolver | None = None
        self._allocator: Allocator | None = None
        if joint:
            if system.classes:
                self.prices = ClassPrices(_classes(scenario), system.fairness)
            profile, shared = hardware.profile(self.ranks[0], n), None
            if system.split_profile:
                profile = hardware.profile(self.ranks[0], 1)
                own, shared = split_profiles(CostCurve.of(profile), together, n)
                profile = replace(profile, step_time_s=own.step_time_s)
            self.solver = JointSolver(
                [[endpoint.name for endpoint in self.ranks]],
                shared,
                self.prices,
                learns=system.learn,
            )
            self._allocator = Allocator(
                solver=self.solver,
                min_predicted_gain=system.min_predicted_gain,
                max_report_age_s=float("inf"),
            )
            for endpoint in self.ranks:
                self._allocator.fold(replace(profile, rank=endpoint), 0.0)
        classes = ClassAllocation(self.prices.classes) if self.prices else None
        self._deciders = [
            VerifyDecider(endpoint.name, endpoint.epoch, policy, allocate, classes=classes)
            for endpoint, policy in zip(self.ranks, self._locals, strict=True)
        ]

    def decide(
        self,
        rank: int,
        step: int,
        survivals: Float32,
        caps: Int32,
        tenants: Int64,
        num_prefill_tokens: int,
        context_tokens: int,
    ) -> Int32:
        """verify_len of each row of a rank."""
        decision = self._deciders[rank].decide(
            step,
            (),
            survivals,
            caps,
            np.ones(len(caps), bool),
            UNLIMITED,
            num_prefill_tokens,
            context_tokens,
            class_ids=tenants.astype(np.int32),
        )
        return decision.verify_len

    def served(self, num_rounds: Int64, committed: Float64, seconds: float) -> None:
        """What one step brought each tenant [C]: their prices follow it."""
        if self.prices is not None:
            self.prices.observe(num_rounds, committed, seconds)

    def reported(self, reports: list[StepReport], now: float) -> None:
        """After a step: learn from it, and hand out the budgets for the step after the next."""
        if self._allocator is None or self.solver is None:
            if len(self.ranks) == 1 and self.system.learn:
                report = reports[0]
                self._locals[0].times.fold(
                    report.num_requests,
                    report.batch_tokens,
                    report.num_prefill_tokens,
                    report.step_time_s,
                )
            return
        at = {endpoint.name: rank for rank, endpoint in enumerate(self.ranks)}
        for report in reports:
            self._allocator.fold(report, now)
        for budget in self._allocator.budgets(now):
            self._deciders[at[budget.rank]].budgets.offer(budget, reports[0].step)


def _classes(scenario: Scenario) -> list[ServiceClass]:
    return [
        ServiceClass(
            tenant.name,
            tenant.weight,
            tenant.max_tpot_s,
            tenant.min_verify_len,
            tenant.max_verify_len,
        )
        for tenant in scenario.tenants
    ]
