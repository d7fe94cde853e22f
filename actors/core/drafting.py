"""The rank's side of the talk with its drafters: who drafts for whom, what was asked, how long to wait.

Every block is asked for by a `CommitBatch` and answered by a row of a `ProposalBatch` that names the same request,
generation and committed length; anything else is dropped and counted (C4). A drafter that misses a deadline is not
waited for again until it is heard of, and after repeated misses only now and then: a dead or slow drafter costs a
bounded pause, and one that recovers is found again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actors.core.draft_feed import feed_of, held_back
from actors.core.draft_stop import Asked
from actors.core.layout import StepPlan
from actors.core.messages import CloseDraft, CommitBatch, Endpoint, Message, ProposalBatch
from actors.core.prefix_cache import Features, PrefixCache
from actors.core.request import Request
from actors.core.row_table import Mask, RowTable, Slots

Int32 = npt.NDArray[np.int32]

_MAX_BACKOFF_STEPS = 64
_TURNAROUND_WEIGHT = 0.2


@dataclass
class DrafterState:
    """What a rank knows of one incarnation of a drafter."""

    endpoint: Endpoint
    index: int
    num_requests: int = 0
    misses: int = 0  # deadlines missed since the last usable block
    heard: bool = True  # something arrived since the last miss
    retry_step: int = 0
    turnaround_s: float | None = None  # smoothed time from asking to having

    def may_wait(self, step: int) -> bool:
        return self.misses == 0 or (self.heard and step >= self.retry_step)

    def miss(self, step: int, waited_s: float) -> None:
        self.misses += 1
        self.heard = False
        self.retry_step = step + min(2 ** (self.misses - 1) - 1, _MAX_BACKOFF_STEPS)
        self.observe(waited_s)

    def observe(self, turnaround_s: float) -> None:
        old = turnaround_s if self.turnaround_s is None else self.turnaround_s
        self.turnaround_s = old + _TURNAROUND_WEIGHT * (turnaround_s - old)


@dataclass(frozen=True)
class Outlook:
    """Which of some rows still have to be waited for, and until when."""

    pending: Mask  # [R]
    expected_at: float  # when the last of them should be here
    deadline: float  # when the first of them is given up


class DraftExchange:
    """Drafters of one rank, and the blocks asked of them."""

    def __init__(
        self,
        table: RowTable,
        cache: PrefixCache,
        rank: Endpoint,
        max_wait_s: float,
        vocab_size: int,
    ) -> None:
        self._table = table
        self._cache = cache
        self._rank = rank
        self._max_wait_s = max_wait_s
        self._vocab_size = vocab_size
        self._drafters: dict[str, DrafterState] = {}
        self._next_index = 0
        self._closing: dict[str, list[str]] = {}
        self._has_fed = False  # since it last said that no request lives
        self.dropped: Counter[str] = Counter()  # proposal rows by reason

    @property
    def drafters(self) -> Mapping[str, DrafterState]:
        return self._drafters

    def set_drafters(self, endpoints: Sequence[Endpoint]) -> bool:
        """The drafters alive now; whether a new one is among them. What was asked of one that went away is void."""
        old, self._drafters = self._drafters, {}
        for endpoint in endpoints:
            known = old.get(endpoint.name)
            if known is not None and known.endpoint == endpoint:
                self._drafters[endpoint.name] = known
                continue
            self._drafters[endpoint.name] = DrafterState(endpoint, self._next_index)
            self._next_index += 1
            self._closing.pop(endpoint.name, None)
        for name in old.keys() - self._drafters.keys():
            self._closing.pop(name, None)
        for request in self._table.requests:
            if request is not None and request.drafter is not None:
                self._rebind(request)
        return any(old.get(name) is not state for name, state in self._drafters.items())

    def _rebind(self, request: Request) -> None:
        table, slot = self._table, request.slot
        assert request.drafter is not None
        state = self._drafters.get(request.drafter)
        index = -1 if state is None else state.index
        if index == table.drafter_index[slot]:
            return
        table.wants_draft[slot] = table.has_draft[slot] = False
        table.drafter_index[slot] = index
        table.draft_len[slot] = 0
        if state is None:
            request.drafter = None
        else:
            state.num_requests += 1

    def _assign(self, request: Request) -> None:
        if not self._drafters:
            return
        state = min(self._drafters.values(), key=lambda drafter: drafter.num_requests)
        state.num_requests += 1
        request.drafter = state.endpoint.name
        self._table.drafter_index[request.slot] = state.index
        self._table.draft_len[request.slot] = 0

    def receive(self, batch: ProposalBatch, requests: Mapping[str, Request], now: float) -> None:
        """Store the rows somebody waits for; drop and count the others."""
        state = self._drafters.get(batch.drafter)
        if state is None:
            self.dropped["unknown drafter"] += len(batch.request_ids)
            return
        state.heard = True
        if not self._well_formed(batch):
            self.dropped["malformed"] += len(batch.request_ids)
            return
        table = self._table
        unknown = -1
        slots = np.array(
            [r.slot if (r := requests.get(i)) else unknown for i in batch.request_ids], np.intp
        )
        fits = (
            (slots != unknown)
            & table.wants_draft[slots]
            & (table.generation[slots] == batch.generations)
            & (table.committed_len[slots] == batch.committed_lens)
            & (table.drafter_index[slots] == state.index)
        )
        # A repeated row inside one message would be stored twice: the first one counts.
        rows = np.flatnonzero(fits)
        _, first = np.unique(slots[rows], return_index=True)
        rows = rows[first]
        self.dropped["stale"] += len(batch.request_ids) - len(rows)
        if len(rows):
            state.misses = 0
            answered = slots[rows]
            state.observe(max(0.0, now - float(table.told_at[answered].min())))
            table.store_drafts(batch, rows, answered)
            # A drafter answers in order: what was asked before this and is not here will hardly come.
            overtaken = table.told_at <= table.told_at[answered].max()
            table.is_due[overtaken & (table.drafter_index == state.index)] = False

    def _well_formed(self, batch: ProposalBatch) -> bool:
        count, gamma = len(batch.request_ids), self._table.gamma
        tokens, conf, lens = batch.draft_token_ids, batch.confidences, batch.draft_lens
        return (
            tokens.shape == conf.shape == (count, gamma)
            and batch.q_ids.shape == batch.q_probs.shape
            and batch.q_ids.shape[:2] == (count, gamma)
            and len(batch.generations) == len(batch.committed_lens) == count
            and (
                lens is None
                or (lens.shape == (count,) and bool(((lens >= 0) & (lens <= gamma)).all()))
            )
            and bool(((tokens >= 0) & (tokens < self._vocab_size)).all())
            and bool(((conf >= 0) & (conf <= 1)).all())  # NaN is neither
        )

    def outlook(self, slots: Slots, step: int, now: float) -> Outlook:
        """Judge the rows that were asked for and have not come. Deadlines that passed are misses."""
        table = self._table
        pending = np.zeros(len(slots), np.bool_)
        expected_at, deadline = now, np.inf
        wanted = table.wants_draft[slots] & table.is_due[slots]
        if not wanted.any():
            return Outlook(pending, expected_at, deadline)
        for state in self._drafters.values():
            mine = wanted & (table.drafter_index[slots] == state.index)
            if not mine.any() or not state.may_wait(step):
                continue
            asked_at = table.told_at[slots[mine]]
            if now >= asked_at.min() + self._max_wait_s:
                state.miss(step, self._max_wait_s)
                continue
            pending |= mine
            deadline = min(deadline, float(asked_at.min()) + self._max_wait_s)
            patience = self._max_wait_s if state.turnaround_s is None else state.turnaround_s
            expected_at = max(expected_at, float(asked_at.max()) + patience)
        return Outlook(pending, expected_at, deadline)

    def askable(self, rows: Sequence[Request], num_kept: Int32) -> Slots:
        """Slots past their prompts that can use a block; `num_kept` as in `commit_batches`."""
        if not self._drafters:
            return np.zeros(0, np.intp)
        slots = np.array([request.slot for request in rows], np.intp)[num_kept > 0]
        return slots[self._table.is_running[slots]]

    def commit_batches(
        self,
        plan: StepPlan,
        features: Features | None,
        rows: Sequence[Request],
        num_kept: Int32,
        asked: Asked,
        now: float,
    ) -> list[tuple[Endpoint, Message]]:
        """Tell the drafters what the step committed, and ask for the next blocks.

        Args:
            num_kept: [R] leading tokens of each plan row that are committed now: the whole chunk of a prefill row, the
                anchor and the accepted draft tokens of a round, 0 for a row no drafter hears of (any more).
            asked: who shall get a block, and how far it is drafted. The others are told now and then (`held_back`).
        """
        table = self._table
        for row in np.flatnonzero(num_kept).tolist():
            if rows[row].drafter is None:
                self._assign(rows[row])
        slots = np.array([request.slot for request in rows], np.intp)
        if features is None:  # a target without taps, for a drafter that only reads tokens
            features = np.zeros((plan.batch_tokens, 0), np.float32)
        waits = held_back(plan, slots, num_kept, asked.asks, table, self._cache, now)
        table.is_unasked[slots[waits]] = True
        is_told = (num_kept > 0) & ~waits
        out: list[tuple[Endpoint, Message]] = []
        for state in self._drafters.values():
            mine = is_told & (table.drafter_index[slots] == state.index)
            if not mine.any():
                continue
            chosen = np.flatnonzero(mine)
            own = slots[chosen]
            feed = feed_of(plan, features, rows, num_kept * mine, table, self._cache)
            batch = CommitBatch(
                rank=self._rank,
                step=plan.step,
                request_ids=tuple(rows[row].request_id for row in chosen.tolist()),
                generations=table.generation[own],
                committed_lens=feed.committed_lens,
                anchor_token_ids=feed.anchor_token_ids,
                wants_block=self._ask(own, feed.is_whole, asked.asks, now),
                min_survivals=asked.min_survivals[own],
                first_positions=feed.first_positions,
                cu_feature_len=feed.cu_feature_len,
                token_ids=feed.token_ids,
                features=feed.features,
                verify_lens=plan.verify_len[chosen],
                sampling=table.sampling.rows(own),
            )
            out.append((state.endpoint, batch))
        self._has_fed |= bool(out)
        return out

    def _ask(self, slots: Slots, is_whole: Mask, asks: Mask, now: float) -> Mask:
        """Note who is asked for a block, and who past the prompt is not although one could be drafted."""
        table = self._table
        wants: Mask = asks[slots] & is_whole
        table.wants_draft[slots] = table.is_due[slots] = wants
        table.is_unasked[slots] = table.is_running[slots] & is_whole & ~wants
        table.told_at[slots] = now
        return wants

    def close(self, request: Request) -> None:
        """The request is over: its drafter, if it has one, shall forget it (sent by `flush`)."""
        if request.drafter is None:
            return
        self._drafters[request.drafter].num_requests -= 1
        self._closing.setdefault(request.drafter, []).append(request.request_id)
        request.drafter = None

    def forget_all(self, step: int) -> list[tuple[Endpoint, Message]]:
        """No request lives: tell the drafters once, in case they missed the end of one. `step`: the next one."""
        if not self._has_fed:
            return []
        self._has_fed = False
        forget = CloseDraft(self._rank.name, (), before_step=step)
        return [*self.flush(), *((state.endpoint, forget) for state in self._drafters.values())]

    def flush(self) -> list[tuple[Endpoint, Message]]:
        closing, self._closing = self._closing, {}
        return [
            (self._drafters[name].endpoint, CloseDraft(self._rank.name, tuple(ids)))
            for name, ids in closing.items()
        ]
