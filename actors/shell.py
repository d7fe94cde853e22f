"""What the shells of target, drafter and allocator have in common: one loop thread, a life, control calls.

The loop thread owns the link and the state machine. Control methods are coroutines on the actor's event loop, so they
answer while the loop computes; what touches the state is handed to the loop and runs between two turns.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, TypeVar

import psutil

from actors import tracing
from actors.core.messages import Endpoint, Message
from actors.engine.base import DrafterSpec, TargetSpec
from actors.link import Link, Role, open_link
from actors.link.local import Frames
from actors.peers import Description, Peers, Phase, Seat
from configs.revisions import FIRST, Revision
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILED_START_VISIBLE_S = 3.0  # so that the starter can read the cause before Ray tries again
CONTROL_TIMEOUT_S = 30.0
ASK_INTERVAL_S = 0.5  # between two tries to learn one's settings
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Shell:
    """A process of the cluster. Subclasses say what they prepare and what one turn of their loop does.

    Args:
        seat: name, keys and threads.
        link_kind: which transport.
        on_failure: ends the process; the argument says whether it had been ready.
    """

    role: Role

    def __init__(
        self,
        seat: Seat,
        link_kind: Literal["zmq", "actor"],
        on_failure: Callable[[bool, str], None] | None = None,
    ) -> None:
        self.seat = seat
        self.link: Link
        self.peers = Peers(version=0)
        self._link_kind = link_kind
        self._on_failure = self._end_process if on_failure is None else on_failure
        self._phase: Phase = "starting"
        self._detail = ""
        self.warning = ""
        self.revision = FIRST  # of the settings it was started with
        self.integrity_problems: tuple[str, ...] = ()
        self._last_turn = time.monotonic()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"{seat.name}-loop", daemon=True)

    def start(self) -> None:
        """Begin the loop; the constructor of the subclass calls it last."""
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)  # a Ray worker has no handler
        tracing.setup(self.seat.telemetry, self.role, self.seat.name)
        self._thread.start()

    # --- the loop thread --------------------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Load and measure, before the first turn, with `self.link` open. Returns what to say when ready."""
        return ""

    def begin(self, note: str) -> None:
        """All is prepared, the first turn comes next; `note` is what `prepare` had to say."""
        self.enter("ready", note)

    def adopt(self, config: ClusterConfig) -> None:
        """Start with these settings instead of those it was made with."""

    def turn(self) -> None:
        """Poll, decide, compute, send: once."""
        raise NotImplementedError

    def meet(self, old: Peers, new: Peers) -> None:
        """The peers have changed."""

    def tear_down(self) -> None:
        """The loop has ended in order."""

    @property
    def spec(self) -> TargetSpec | DrafterSpec | None:
        return None

    @property
    def draft_times(self) -> tuple[tuple[int, float], ...]:
        return ()

    @property
    def host(self) -> str:
        """The address others reach this process at."""
        return self.seat.host or _node_ip()

    @property
    def offer(self) -> str:
        return ""

    @property
    def waited_s(self) -> float:
        return 0.0

    def enter(self, phase: Phase, detail: str = "") -> None:
        self._phase, self._detail = phase, detail
        self._last_turn = time.monotonic()
        log.info("%s: %s %s", self.seat.name, phase, detail)

    def send_all(self, outgoing: list[tuple[Endpoint, Message]]) -> None:
        for to, message in outgoing:
            self.link.send(to, message)

    def _live(self) -> None:
        try:
            seat = self.seat
            who, own_actor = (seat.name, self.role), f"{seat.namespace}/{seat.name}"
            self.link = open_link(self._link_kind, *who, seat.membership, self.host, own_actor)
            if self._learn_settings():
                self.enter(
                    "parked"
                )  # nothing is loaded until another process takes this one's place
                self._stopping.wait()
            else:
                self._take_turns()
            self.enter("stopped")
        except BaseException as error:
            self._fail(error)
        finally:
            self._obey()
            if hasattr(self, "link"):
                self.link.close()
            tracing.flush()

    def _take_turns(self) -> None:
        self.begin(self.prepare())
        while not self._stopping.is_set():
            self._obey()
            self.turn()
            self._last_turn = time.monotonic()
        self.tear_down()

    def _learn_settings(self) -> bool:
        """A process that Ray has started again runs what was rolled out since the first one was made; whether it is
        parked instead."""
        revision = assigned_revision(self.seat, self._stopping)
        if revision is None:
            return False
        self.revision = revision.number
        self.adopt(revision.config)
        return revision.is_parked

    def _obey(self) -> None:
        while self._commands:
            action, answer = self._commands.popleft()
            if not answer.set_running_or_notify_cancel():
                continue  # its caller has given up
            try:
                answer.set_result(action())
            except Exception as error:
                log.exception("%s: a control call failed", self.seat.name)
                answer.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        was_ready = self._phase in ("ready", "draining")
        cause = f"{type(error).__name__}: {error}"
        doing = self._phase
        self._phase, self._detail = "failed", cause
        text = "".join(traceback.format_exception(error))
        log.critical("%s failed while %s: %s\n%s", self.seat.name, doing, cause, text)
        self._on_failure(was_ready, cause)

    def _end_process(self, was_ready: bool, cause: str) -> None:
        """Ray starts the actor again; a loop that silently stands still would not be noticed."""
        import ray

        try:
            supervisor: Any = ray.get_actor("supervisor", namespace=self.seat.namespace)
            told = supervisor.report_failure.remote(self.seat.name, cause)
            ray.wait([told], timeout=0.5)
        except Exception as error:
            log.warning("the supervisor could not be told: %s", error)
        if not was_ready:
            time.sleep(FAILED_START_VISIBLE_S)
        logging.shutdown()
        os._exit(1)

    # --- control calls ----------------------------------------------------------------------------------------------

    async def describe(self) -> Description:
        endpoint = self.link.endpoint if hasattr(self, "link") else None
        return Description(
            name=self.seat.name,
            role=self.role,
            phase=self._phase,
            detail=self._detail,
            endpoint=endpoint,
            spec=self.spec,
            draft_times=self.draft_times,
            peers_version=self.peers.version,
            turn_age_s=time.monotonic() - self._last_turn,
            pid=os.getpid(),
            node_ip=_node_ip(),
            warning=self.warning,
            integrity_problems=self.integrity_problems,
            offer=self.offer,
            waited_s=self.waited_s,
            order=self.peers.order,
            assignment=self.peers.assignment,
            revision=self.revision,
            memory_bytes=psutil.Process().memory_info().rss,
        )

    async def connect(self, peers: Peers) -> None:
        """Take over a newer view of who is there; an older one is ignored."""
        await self.on_loop(lambda: self._connect(peers))

    def _connect(self, peers: Peers) -> None:
        if peers.version > self.peers.version:
            old = self.peers
            # A supervisor that has just started may not have heard of the newest policy or revision yet.
            orders = [order for order in (old.order, peers.order) if order is not None]
            wishes = [wish for wish in (old.assignment, peers.assignment) if wish is not None]
            self.peers = replace(
                peers,
                order=max(orders, key=lambda order: order.number, default=None),
                assignment=max(wishes, key=lambda wish: wish.version, default=None),
            )
            self.meet(old, self.peers)

    async def stop(self) -> None:
        """End the loop after this turn and close the link."""
        self._stopping.set()
        if hasattr(self, "link"):
            self.link.wake()
        await asyncio.to_thread(self._thread.join, CONTROL_TIMEOUT_S)

    async def deliver(self, epoch: str, batch: list[Frames]) -> int:
        """Messages from a link made of actor calls; how many were taken."""
        from actors.link.actor_link import ActorLink

        link = getattr(self, "link", None)
        return link.deliver(epoch, batch) if isinstance(link, ActorLink) else 0

    async def on_loop(self, action: Callable[[], T]) -> T:
        """Run `action` on the loop thread between two turns."""
        answer: Future[T] = Future()
        self._commands.append((action, answer))
        if hasattr(self, "link"):
            self.link.wake()
        return await asyncio.wait_for(asyncio.wrap_future(answer), CONTROL_TIMEOUT_S)


@functools.cache
def _node_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"


def assigned_revision(seat: Seat, stopping: threading.Event) -> Revision | None:
    """What the supervisor wants a restarted actor to run; None in its first process, which has it already."""
    import ray
    from ray.exceptions import RayError

    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return None
    if not context.was_current_actor_reconstructed:
        return None
    while not stopping.is_set():
        try:
            supervisor: Any = ray.get_actor("supervisor", namespace=seat.namespace)
            found: Revision = ray.get(
                supervisor.revision_of.remote(seat.name), timeout=CONTROL_TIMEOUT_S
            )
            return found
        except (ValueError, RayError) as error:  # it may be starting again itself
            log.warning("%s cannot learn its settings yet: %s", seat.name, error)
            stopping.wait(ASK_INTERVAL_S)
    return None
