"""A target rank among those it steps with: it meets them, follows or leads their first steps, joins theirs, leaves.

The rank's loop thread calls everything but `receive` and `progress`, which the control thread may.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from actors.core.lockstep import CollectiveError, Formation, StepLayout
from actors.engine.base import TargetEngine
from configs.schema import ClusterConfig

if TYPE_CHECKING:  # they import torch, which the process that starts the cluster does without
    from actors.engine.collective import DistributedCollective
    from actors.engine.expert_group import ExpertGroup

log = logging.getLogger(__name__)

IDLE_TURN_S = (
    0.02  # a rank that gets a request while all are idle waits for the others about so long
)
JOIN_WITHIN_S = 60.0  # processes that were told of each other a moment ago
WATCH_INTERVAL_S = 0.25
# The collective itself should fail first and say more; a backend that does not is ended by the watchdog.
WATCHDOG_SLACK = 1.5


class GroupLeftError(RuntimeError):
    """A rank has left the group in order, this one was not told to stop: it cannot step on alone."""


class GroupedEngine(TargetEngine, Protocol):
    """A target whose steps are collectives of a group: `step` votes first, `join` takes part without tokens."""

    group: ExpertGroup
    num_uncaptured: (
        int  # steps that were launched operation by operation, though a GPU could replay them
    )

    def join(self, *, is_leaving: bool = False) -> StepLayout: ...


class GroupMember:
    """One rank's membership, from the moment its engine is loaded.

    Args:
        engine: a `GroupedEngine`.
        host: the address other ranks reach this process at.
        on_stuck: ends the process, from the watchdog's thread: the loop thread hangs in a collective.
    """

    def __init__(
        self,
        engine: TargetEngine,
        config: ClusterConfig,
        host: str,
        on_stuck: Callable[[BaseException], None],
    ) -> None:
        from actors.engine.collective import open_store

        self._engine = cast(GroupedEngine, engine)
        self._group = self._engine.group
        self._group.node = zlib.crc32(host.encode())
        self._bound_s = config.target.collective_timeout_s
        self._device, self._on_stuck, self._host = config.model.device, on_stuck, host
        # Every rank offers one: who leads is known, but not to whom the supervisor has already spoken.
        self._store, self.offer = open_store(host)
        self._formation: Formation | None = None
        self._has_formation, self._is_over = threading.Event(), threading.Event()
        self._collective: DistributedCollective | None = None
        self._left: tuple[int, ...] = ()
        self._left_at = 0.0
        self._held_since: float | None = None
        self._most_imbalance = 1.0

    # --- meeting ----------------------------------------------------------------------------------------------------

    def receive(self, formation: Formation) -> None:
        """The supervisor says where the others are; only the first word counts for one process."""
        if self._formation is None:
            self._formation = formation
            self.offer = ""
            self._has_formation.set()

    def meet(self, is_stopping: Callable[[], bool]) -> None:
        """Wait to be told of the others, and connect. Raises CollectiveError when one of them does not come."""
        from actors.engine.collective import DistributedCollective

        while not self._has_formation.wait(WATCH_INTERVAL_S):
            if is_stopping():
                raise CollectiveError("stopped while waiting for its group")
        formation = self._formation
        assert formation is not None and formation.rank == self._group.rank
        self._collective = DistributedCollective.join(
            formation.address,
            formation.epoch,
            formation.rank,
            self._group.size,
            self._bound_s,
            JOIN_WITHIN_S,
            self._device,
            self._host,
        )
        self._group.attach(self._collective)
        threading.Thread(target=self._watch, name="group-watchdog", daemon=True).start()
        log.info(
            "rank %d of %d is in its group (epoch %d)",
            formation.rank,
            self._group.size,
            formation.epoch,
        )

    def led(self, work: Callable[[], Sequence[float]]) -> list[float]:
        """What `work` finds on rank 0, whose steps the other ranks follow meanwhile; the same on all of them."""
        found: Sequence[float] = ()
        if self._group.rank:
            while self._engine.join().is_led:
                pass
        else:
            self._group.is_leading = True
            found = work()
            self._group.is_leading = False
            self._engine.join()
        return self._group.share(found)

    # --- stepping ---------------------------------------------------------------------------------------------------

    def idle(self) -> float:
        """Take part in a step without tokens; returns how long to wait for messages before the next one."""
        self._held_since = None
        return self._join()

    def hold(self, now: float, until: float, patience_s: float) -> float:
        """This rank waits for blocks: the others wait with it for `patience_s`, then they step without it.

        Returns how long to wait for messages.
        """
        if self._held_since is None:
            self._held_since = now
        patient_until = self._held_since + patience_s
        if now < patient_until:
            return max(0.0, min(until, patient_until) - now)
        return min(self._join(), max(0.0, until - now))

    def stepped(self) -> None:
        """The engine has run a step with tokens of this rank."""
        self._held_since = None
        self._note(self._group.layout)

    def _join(self) -> float:
        if self._left:
            self._wait_for_stop()
            return IDLE_TURN_S
        layout = self._engine.join()
        self._note(layout)
        return 0.0 if layout.runs else IDLE_TURN_S

    def _note(self, layout: StepLayout) -> None:
        self._most_imbalance = max(self._most_imbalance, layout.imbalance)
        if layout.leaving and not self._left:
            self._left, self._left_at = layout.leaving, time.monotonic()

    @property
    def is_closed(self) -> bool:
        """Whether a rank has left: nobody steps any more."""
        return bool(self._left)

    def _wait_for_stop(self) -> None:
        """A cluster that stops tells all ranks within a moment; beyond that the group is broken."""
        if time.monotonic() - self._left_at > self._bound_s:
            raise GroupLeftError(f"ranks {list(self._left)} have left the group")

    def leave(self) -> None:
        """Say that this rank steps no more, unless another has said so before."""
        if self._collective is not None and not self._left:
            try:
                self._engine.join(is_leaving=True)
            except CollectiveError as error:
                log.warning("the group had ended before this rank left it: %s", error)
        self._is_over.set()

    # --- watching ---------------------------------------------------------------------------------------------------

    def waited_s(self) -> float:
        """Seconds in the collective under way; 0 between two."""
        if self._collective is None:
            return 0.0
        return self._collective.progress.waited_s(time.monotonic())

    def _watch(self) -> None:
        assert self._collective is not None
        progress = self._collective.progress
        while not self._is_over.wait(WATCH_INTERVAL_S):
            if progress.is_stuck(time.monotonic(), WATCHDOG_SLACK):
                break
        else:
            return
        cause = f"collective {progress.num_collectives} did not end within {self._bound_s:g} s"
        self._on_stuck(CollectiveError(cause))

    def stats(self) -> dict[str, Any]:
        """For `stats` of the rank."""
        progress = self._collective.progress if self._collective else None
        return {
            "rank": self._group.rank,
            "size": self._group.size,
            "epoch": self._formation.epoch if self._formation else None,
            "num_steps": progress.num_steps if progress else 0,
            "num_collectives": progress.num_collectives if progress else 0,
            "waited_s": self.waited_s(),
            "most_imbalance": self._most_imbalance,
            "num_uncaptured": self._engine.num_uncaptured,
            **self._group.balance,
        }
