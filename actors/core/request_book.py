"""All live requests of a rank: admission, ends, and the one way in which slots and blocks come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from actors.core.admission import AdmissionDesk, RankLimits
from actors.core.block_room import make_room, precedence
from actors.core.drafting import DraftExchange
from actors.core.explain import LogShelf, explanation
from actors.core.kv_blocks import BlockPool
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    Endpoint,
    ReservationReply,
    Reserve,
    TokenDelta,
)
from actors.core.prefix_cache import PrefixCache
from actors.core.rank_counters import RankCounters
from actors.core.request import Request
from actors.core.row_table import RowTable


class RequestBook:
    """Owns the pool, the slots and the queue. `is_in_step` tells which requests the engine works on now: theirs are
    given back by `release` when that step is over, all others at once."""

    def __init__(
        self,
        rank: Endpoint,
        limits: RankLimits,
        counters: RankCounters,
        is_in_step: Callable[[Request], bool],
    ) -> None:
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.table = RowTable(
            limits.max_running, self.pool.blocks_for(limits.max_model_len), limits.gamma
        )
        self.cache = PrefixCache(self.pool, limits.model_identity, limits.prefix_cache)
        self.desk = AdmissionDesk(self.pool, limits, rank.name)
        self.drafts = DraftExchange(
            self.table, self.cache, rank, limits.max_wait_s, limits.vocab_size
        )
        self.logs = LogShelf(limits.explain_rounds)
        self.live: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self._counters = counters
        self._is_in_step = is_in_step

    def reserve(self, message: Reserve, step_time_s: float, now: float) -> ReservationReply:
        """Answer for room; whoever gets none may come back when the first running request should be over."""
        self.desk.expire(now)
        left = self.table.num_remaining[self.table.is_running]
        retry_after_s = None
        if len(left) and step_time_s:
            acceptance_length = max(1.0, self._counters.acceptance.acceptance_length)
            retry_after_s = float(left.min()) / acceptance_length * step_time_s
        return self.desk.reserve(message, self.live.values(), retry_after_s, now)

    def admit(self, message: AdmittedRequest) -> TokenDelta | None:
        """Let a request in. Returns the delta that ends it when it cannot or need not run."""
        known = self.live.get(message.request_id)
        repeated = known is not None and known.generation >= message.generation
        if repeated or self.desk.is_known(message.request_id, message.generation):
            self._counters.num_ignored += 1
            self.desk.cancel(message.request_id)
            return None
        if known is not None:
            self.end(known)
            self._counters.num_replaced += 1
        request = self.desk.admit(message, self.live.values())
        if isinstance(request, str):
            self.desk.end(message.request_id, message.generation)
            self._counters.num_failed += 1
            first = message.num_prior_tokens
            return TokenDelta(
                message.request_id, message.generation, first, (), "error", error=request
            )
        request.log = self.logs.open(message)
        self.live[request.request_id] = request
        self.waiting.append(request)
        reason = request.finish_before_start()
        if reason is None:
            return None
        self.end(request)
        self._counters.num_finished += 1
        return request.delta((), reason)

    def abort(self, message: AbortRequest) -> Request | None:
        """End a request, or the reservation it never used. Returns what was running."""
        request = self.live.get(message.request_id)
        if request is not None and request.generation > message.generation:
            self._counters.num_ignored += 1
            return None
        self.desk.cancel(message.request_id)
        self.desk.end(message.request_id, message.generation)
        if request is not None:
            self.end(request)
            self._counters.num_aborted += 1
        return request

    def abort_all_of(self, ingress: str) -> None:
        """The replica has died: nobody listens to its streams any more."""
        self.desk.cancel_all_of(ingress)
        for request in [r for r in self.live.values() if r.admitted.reply_to.name == ingress]:
            self.end(request)
            self._counters.num_aborted += 1

    def give_up(self, why: str) -> dict[Endpoint, list[TokenDelta]]:
        """End every request; the last delta of each tells its ingress to go on elsewhere."""
        deltas: dict[Endpoint, list[TokenDelta]] = {}
        for request in list(self.live.values()):
            deltas.setdefault(request.admitted.reply_to, []).append(request.delta((), "abort", why))
            self.end(request)
            self._counters.num_aborted += 1
        return deltas

    def start_waiting(self) -> None:
        """Give free slots to those that wait: the lowest priority number first, then first come first served.
        Prompts go on behind what is known of them by now, be it only since the last step."""
        while self.waiting and self.table.num_free:
            request = min(self.waiting, key=precedence)
            known = self.cache.known_blocks(request)
            # Those that have a place will each need a block before long.
            spare = self.table.num_slots - self.table.num_free
            lease = self.pool.lease(request.committed_len, known, spare)
            if lease is None:
                break
            self.waiting.remove(request)
            self.table.place(request, lease)
            self.cache.begin(request, len(known), self.table)
            self.prefilling.append(request)
        for request in self.prefilling:
            self.cache.adopt(request, self.table)

    def make_room(self) -> None:
        """See that running requests have blocks to go on with; whoever has to give theirs up waits."""
        make_room(self.table, self._preempt)

    def _preempt(self, request: Request) -> None:
        self.drafts.close(request)
        self.table.clear(request.slot)
        if request in self.prefilling:
            self.prefilling.remove(request)
        request.preempt()
        self.waiting.append(request)
        self._counters.num_preempted += 1

    def end(self, request: Request) -> None:
        """The one way out: frees draft state now, slot and blocks as soon as no step uses them."""
        request.finish()
        del self.live[request.request_id]
        self.desk.end(request.request_id, request.generation)
        self.drafts.close(request)
        if request.log is not None:
            self.logs.end(request.log)
        if not self._is_in_step(request):
            self.release(request)

    def release(self, request: Request) -> None:
        request.give_back()
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.table.clear(request.slot)
        if request in self.prefilling:
            self.prefilling.remove(request)

    def explain(self, response_id: str) -> dict[str, Any]:
        """What is known here of the rounds of a response (`explain.explanation`)."""
        known_ids = [*self.live, *self.desk.ended_ids]
        return explanation(self.logs.find(response_id), known_ids, response_id)

    def problems(self) -> list[str]:
        """What is not at its baseline, given that nothing runs."""
        problems: list[str] = []
        if self.pool.num_leases:
            problems.append(f"{self.pool.num_leases} leases are open")
        if self.table.num_free != self.table.num_slots:
            problems.append(f"{self.table.num_slots - self.table.num_free} slots are taken")
        if self.waiting or self.prefilling:
            problems.append(f"{len(self.waiting)} waiting, {len(self.prefilling)} prefilling")
        if self.table.has_draft.any() or self.table.wants_draft.any():
            problems.append("a draft is kept, or waited for, for a request that is over")
        for name, drafter in self.drafts.drafters.items():
            if drafter.num_requests:
                problems.append(f"{drafter.num_requests} requests are still bound to {name}")
        return problems
