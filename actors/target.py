"""A target rank's shell: it owns the committed tokens and the KV of its requests, and runs their rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from actors import tracing
from actors.core.lockstep import Formation
from actors.core.messages import RankProfile
from actors.core.own_profile import OwnProfile
from actors.core.rank_report import rank_stats
from actors.core.rank_view import rank_view
from actors.engine.base import TargetEngine, TargetSpec
from actors.group_member import GroupMember
from actors.peers import Peers, Seat
from actors.rank_start import (
    MeasureSteps,
    decider_of,
    farewells,
    gamma_of,
    misfit,
    policy_of,
    rank_of,
    rows_are_invariant,
)
from actors.rank_turns import RankTurns
from actors.tracing.rank_spans import RankSpans
from configs.change import PolicyOrder
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

TargetEngineFactory = Callable[[ClusterConfig, Seat], TargetEngine]


class TargetActor(RankTurns):
    """One target rank: what it loads, whom it knows, what it can be told.

    Args:
        seat: name, keys and threads.
        config: the cluster's configuration.
        engine_factory: loads the engine; called on the loop thread.
        measure_steps: measures the cost curve of the loaded engine.
    """

    def __init__(
        self,
        seat: Seat,
        config: ClusterConfig,
        engine_factory: TargetEngineFactory,
        measure_steps: MeasureSteps,
        **kwargs: Any,
    ) -> None:
        super().__init__(seat, config.link.kind, policy_of(config.policy), **kwargs)
        self._config = config
        self._engine_factory = engine_factory
        self._measure_steps = measure_steps
        self._spec: TargetSpec | None = None
        self._profile: OwnProfile | None = None
        self._is_row_invariant: bool | None = None
        self.start()

    @property
    def spec(self) -> TargetSpec | None:
        return self._spec

    @property
    def offer(self) -> str:
        return self._member.offer if self._member else ""

    @property
    def waited_s(self) -> float:
        return self._member.waited_s() if self._member else 0.0

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare(self) -> str:
        config = self._config
        self.enter("loading", config.model.path)
        with tracing.span(tracing.SPAN_LOAD, {tracing.ATTR_RANK: self.seat.name}):
            self._engine = self._engine_factory(config, self.seat)
        if config.target.group_size > 1:
            self._meet_group()
        note = self._check_rows() if config.model.numerics == "reproducible" else ""
        self.enter("measuring", "step times")
        spec, endpoint = self._engine.spec, self.link.endpoint
        measured = self._measure_steps(self._engine, config)
        times = self._policy.times
        self._profile = OwnProfile(endpoint, spec.identity, measured, gamma_of(config), times)
        if self._profile.problem:
            self._warn(self._profile.problem)
        self._decider = decider_of(endpoint, config, self._policy)
        self._rank = rank_of(endpoint, spec, config, self._decider, self._policy)
        self._spec = spec
        self._spans = RankSpans(endpoint.name, tracing.tracer())
        return note

    def adopt(self, config: ClusterConfig) -> None:
        self._config, self._policy = config, policy_of(config.policy)

    def _meet_group(self) -> None:
        self._member = GroupMember(self._engine, self._config, self.host, self._fail)
        self.enter("forming", f"group of {self._config.target.group_size}")
        self._member.meet(self._stopping.is_set)

    def _check_rows(self) -> str:
        self.enter("measuring", "row invariance")
        self._is_row_invariant = rows_are_invariant(self._engine, self._member)
        if self._is_row_invariant:
            return "(a row's result does not depend on its batch)"
        note = (
            "WARNING: numerics=reproducible, but a row's result depends on its batch here; the same "
            "seed may give other tokens. Use dtype=float32 or numerics=fast"
        )
        self._warn(note.removeprefix("WARNING: "))
        return note

    def _warn(self, problem: str) -> None:
        """Say it in the log, and in /health for as long as this incarnation lives."""
        log.error("%s: %s", self.seat.name, problem)
        self.warning = "; ".join(filter(None, (self.warning, problem)))

    # --- peers ------------------------------------------------------------------------------------------------------

    def meet(self, old: Peers, new: Peers) -> None:
        rank = self._rank
        misfits = {d: misfit(d.spec, self._engine.spec, rank.limits.gamma) for d in new.drafters}
        usable = [drafter for drafter, why in misfits.items() if not why]
        for drafter, why in misfits.items():
            if why:
                log.error("%s is not used by %s: %s", drafter.endpoint.name, self.seat.name, why)
        if new.is_drained != old.is_drained:
            rank.drain(is_drained=new.is_drained)
            self.enter("draining" if new.is_drained else "ready")
        if new.order is not None and new.order != old.order:
            self._adopt(new.order)
        endpoints = [d.endpoint for d in usable if self._config.policy.name != "none"]
        self.send_all(farewells(rank, [d.endpoint for d in old.drafters], endpoints))
        rank.set_drafters(endpoints)
        rank.allocator = new.allocator
        drafting_changed = old.drafters != new.drafters
        if drafting_changed and usable and self._profile is not None:
            self._profile.take_draft_times(usable[0].draft_times)
        if new.allocator is not None and (drafting_changed or old.allocator != new.allocator):
            self._introduce()

    def _adopt(self, order: PolicyOrder) -> None:
        """Between two steps, and known to nobody's drafts: the next step is decided by the new policy (C3)."""
        self._config = self._config.model_copy(update={"policy": order.policy})
        self._policy = policy_of(order.policy, self._policy.times)
        self._decider.adopt(order.number, self._policy, self._policy.drafting)
        self._rank.calibration.follow(order.policy.name)
        log.info("%s: policy %s", self.seat.name, order.policy.name)

    def _introduce(self) -> None:
        """A new allocator knows nothing; it gets the curve and the last report."""
        rank = self._rank
        assert rank.allocator is not None and self._profile is not None
        self.link.send(rank.allocator, self._profile.message)
        self.send_all([(rank.allocator, rank.report)] if rank.report else rank.report_idle())

    # --- control ----------------------------------------------------------------------------------------------------

    def tear_down(self) -> None:
        self._spans.end_gone(())
        if self._member:
            self._member.leave()

    async def form(self, formation: Formation) -> None:
        """The supervisor has all ranks of the group together."""
        if self._member:
            self._member.receive(formation)

    async def move_streams(self) -> int:
        """Give every request back to its ingress, which goes on with it elsewhere; how many they were."""
        return await self.on_loop(self._give_up)

    def _give_up(self) -> int:
        num_requests = len(self._rank.book.live)
        self.send_all(self._rank.give_up("the rank is drained"))
        self._spans.end_gone(self._rank.book.live)
        return num_requests

    async def profile(self) -> RankProfile | None:
        """The measured cost curve."""
        return self._profile.message if self._profile else None

    async def explain(self, response_id: str) -> dict[str, Any]:
        """Why the rounds of a response were verified as far as they were (C11); see `core.explain.explanation`."""
        return await self.on_loop(lambda: self._rank.book.explain(response_id))

    async def stats(self) -> dict[str, Any]:
        """Counts since this incarnation started, and the verdict of the last idle check."""
        return await self.on_loop(self._stats)

    def _stats(self) -> dict[str, Any]:
        rank, step_s = self._rank, self._clock.step_s
        return {
            **rank_stats(rank),
            **rank_view(rank.counters, self._clock, self._policy.times, rank.landed),
            "step_s": step_s,
            **self._decider.cost(step_s),
            "policy": self._policy.name,
            "is_row_invariant": self._is_row_invariant,
            **self._idle.stats(),
            "num_unexpected": self._num_unexpected,
            "num_engine_failures": self._num_engine_failures,
            "group": self._member.stats() if self._member else None,
            "link": asdict(self.link.counters),
        }
