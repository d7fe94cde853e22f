"""Asks ranks for room and waits for their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from actors.core.messages import AbortRequest, Endpoint, ReservationReply, Reserve
from actors.link import Link
from cluster.streams import StreamJournal

logger = logging.getLogger(__name__)

REPEAT_S = 1.0  # the question or its answer may have been lost, and asking again renews the same reservation


@dataclass
class PendingReservation:
    """Somebody waits for this rank's answer; None means that the rank has gone."""

    rank: Endpoint
    answer: asyncio.Future[ReservationReply | None]


class ReservationDesk:
    """Every reservation that waits for an answer. One that is given up, for whatever reason, is undone at the rank."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._pending: dict[tuple[str, str], PendingReservation] = {}

    async def ask(self, to: Endpoint, journal: StreamJournal) -> ReservationReply | None:
        """The rank's answer for what is still to come of a stream; None when it gives none in time."""
        order = journal.order
        key = (order.request_id, to.name)
        pending = PendingReservation(to, asyncio.get_running_loop().create_future())
        self._pending[key] = pending
        answered = False
        try:
            prompt_len = len(order.prompt_ids) + len(journal.token_ids)
            question = Reserve(
                order.request_id, self._link.endpoint, prompt_len, journal.num_remaining
            )
            # Not wait_for: in Python 3.11 it may swallow the cancellation of a client that leaves just now.
            async with asyncio.timeout(self._timeout_s):
                while not pending.answer.done():
                    self._link.send(to, question)
                    await asyncio.wait((pending.answer,), timeout=REPEAT_S)
            reply = pending.answer.result()
            answered = reply is not None
            return reply
        except TimeoutError:
            logger.warning("rank %s gave no answer to a reservation", to.name)
            return None
        finally:
            del self._pending[key]
            if not answered:
                # With the generation that is over: the next one may still be placed on this very rank.
                self._link.send(to, AbortRequest(order.request_id, journal.generation))

    def take(self, reply: ReservationReply) -> None:
        """An answer has come; nobody may wait for it any more."""
        pending = self._pending.get((reply.request_id, reply.rank))
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(reply)

    def give_up_on(self, is_lost: Callable[[Endpoint], bool]) -> None:
        """Nobody waits for a rank that cannot answer."""
        for pending in self._pending.values():
            if not pending.answer.done() and is_lost(pending.rank):
                pending.answer.set_result(None)
