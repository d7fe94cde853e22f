"""The allocator's shell: reports in, budgets and load views out.

Advisory: losing it costs throughput, never a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from actors.core.budget_solver import BudgetSolver, EachAlone
from actors.core.capacity import Allocator, BudgetRecord
from actors.core.classes import ClassPrices
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import Endpoint, RankProfile, StepReport, Subscribe
from actors.core.service_class import classes_of
from actors.core.sps import CurveError
from actors.link import Role
from actors.peers import Peers, Seat
from actors.shell import Shell
from configs.change import PolicyOrder
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

LOAD_VIEW_INTERVAL_S = 0.2
SUBSCRIPTION_S = 5.0  # a subscriber that is silent for longer is forgotten


class AllocatorActor(Shell):
    """One for the cluster."""

    role: Role = "allocator"

    def __init__(self, seat: Seat, config: ClusterConfig, **kwargs: Any) -> None:
        super().__init__(seat, config.link.kind, **kwargs)
        self._config = config
        self._prices: ClassPrices | None = None
        self._brain = Allocator()
        self._adopt(PolicyOrder(0, config.policy))
        self._ranks: dict[str, Endpoint] = {}
        self._subscribers: dict[str, tuple[Endpoint, float]] = {}  # with the time of its heartbeat
        self._next_view = 0.0
        self._num_budgets = self._num_unexpected = 0
        self.start()

    def turn(self) -> None:
        for message in self.link.poll(LOAD_VIEW_INTERVAL_S):
            now = time.monotonic()
            match message:
                case StepReport() | RankProfile():
                    self._fold(message, now)
                case Subscribe():
                    self._subscribers[message.subscriber.name] = (message.subscriber, now)
                case _:
                    self._num_unexpected += 1
                    log.warning("the allocator got a %s", type(message).__name__)
        now = time.monotonic()
        self._publish_budgets(now)
        if now >= self._next_view:
            self._next_view = now + LOAD_VIEW_INTERVAL_S
            self._publish_load(now)

    def _fold(self, message: StepReport | RankProfile, now: float) -> None:
        try:
            if self._brain.fold(message, now):
                self._ranks[message.rank.name] = message.rank
        except CurveError as error:
            log.warning("refused the cost curve of %s: %s", message.rank.name, error)

    def _publish_budgets(self, now: float) -> None:
        for budget in self._brain.budgets(now):
            self._num_budgets += 1
            self.link.send(self._ranks[budget.rank], budget)

    def _publish_load(self, now: float) -> None:
        self._subscribers = {
            name: (endpoint, heard_at)
            for name, (endpoint, heard_at) in self._subscribers.items()
            if now - heard_at <= SUBSCRIPTION_S
        }
        if self._subscribers:
            view = self._brain.load_view(now)
            for endpoint, _ in self._subscribers.values():
                self.link.send(endpoint, view)

    def _adopt(self, order: PolicyOrder) -> None:
        """Plan by this policy from now on."""
        policy = order.policy
        config = self._config = self._config.model_copy(update={"policy": policy})
        classes = classes_of(policy)
        self._prices = ClassPrices(classes, policy.fairness) if classes else None
        limits = policy.budget_ttl_steps, policy.min_predicted_gain
        self._brain.adopt(order.number, policy.name, *limits, _solver(config, self._prices))

    def meet(self, old: Peers, new: Peers) -> None:
        if new.order is not None and new.order != old.order:
            self._adopt(new.order)
        for name in {rank.name for rank in old.ranks} - {rank.name for rank in new.ranks}:
            self._brain.forget(name)
            self._ranks.pop(name, None)
        for rank in set(new.ranks) - set(old.ranks):
            # It may have been too busy to answer the supervisor, and does not introduce itself again.
            if self._brain.recall(rank.name, rank.epoch):
                self._ranks[rank.name] = rank

    async def stats(self) -> dict[str, Any]:
        """Counts since this incarnation started, and the budget of every rank."""
        return await self.on_loop(self._stats)

    async def budgets(self) -> tuple[str, list[BudgetRecord]]:
        """This incarnation, and its last budgets with the reports behind them, oldest first."""
        return await self.on_loop(lambda: (self.link.endpoint.epoch, list(self._brain.records)))

    async def foretell(
        self, units: Sequence[tuple[str, ...]]
    ) -> list[tuple[int, float | None, float | None]]:
        """For whoever decides how many units serve; see `core.capacity.Allocator.foretell`."""
        return await self.on_loop(lambda: self._brain.foretell(units))

    def _stats(self) -> dict[str, Any]:
        load = asdict(self._brain.load_view(time.monotonic()))
        shown = ("max_draft_tokens", "min_survival", "rule", "class_weights", "based_on_step")
        return {
            "policy": self._brain.policy,
            "num_budgets": self._num_budgets,
            "num_by_rule": dict(self._brain.num_by_rule),
            "num_fallbacks": self._brain.num_fallbacks,
            "budgets": {
                rank["rank"]: {name: rank["budget"][name] for name in shown}
                for rank in load["ranks"]
                if rank["budget"]
            },
            "prediction_error": {r["rank"]: r["prediction_error"] for r in load["ranks"]},
            "unmet_classes": list(self._prices.unmet) if self._prices else [],
            "num_stale_reports": self._brain.num_stale_reports,
            "num_refused_curves": self._brain.num_refused_curves,
            "num_unexpected": self._num_unexpected,
            "ranks": sorted(self._ranks),
            "subscribers": sorted(self._subscribers),
            "load": load,
            "link": asdict(self.link.counters),
        }


def _solver(config: ClusterConfig, prices: ClassPrices | None) -> BudgetSolver:
    """Ranks that are copies of one model do not wait for each other, but may share a machine; those that share experts
    do, yet each numbers its own steps: the newest of each stands for a step of the group."""
    if config.policy.name != "joint":
        return EachAlone()
    names = config.target.rank_names
    sharing = config.target.group_size if config.target.group_size > 1 else len(names)
    size = config.policy.group_size or sharing
    groups = [names[first : first + size] for first in range(0, len(names), size)]
    return JointSolver(groups, prices=prices, is_lockstep=False)
