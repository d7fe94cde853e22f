"""The drafter's shell: commits in, blocks out. It owns draft contexts only, and all of them can be rebuilt."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from actors import tracing
from actors.core.messages import CloseDraft, CommitBatch, ProposalBatch
from actors.core.sampling import SamplingBatch
from actors.engine.base import DrafterEngine, DrafterSpec
from actors.engine.drafters.trial import trial_commit
from actors.link import Role
from actors.peers import Peers, Seat
from actors.shell import Shell
from configs.schema import ClusterConfig

log = logging.getLogger(__name__)

IDLE_TURN_S = 1.0
EXPIRE_AFTER_S = 300.0  # a context whose CloseDraft got lost; a living one is simply opened again
MAX_FAILURES_IN_A_ROW = 3
NUM_TRIALS = 3

DrafterEngineFactory = Callable[[ClusterConfig, Seat], DrafterEngine]
DraftTimes = tuple[tuple[int, float], ...]


class DrafterActor(Shell):
    """One of the cluster's drafters.

    Args:
        seat: name, keys and threads.
        config: the cluster's configuration.
        engine_factory: loads the engine; called on the loop thread.
    """

    role: Role = "drafter"

    def __init__(
        self, seat: Seat, config: ClusterConfig, engine_factory: DrafterEngineFactory, **kwargs: Any
    ) -> None:
        super().__init__(seat, config.link.kind, **kwargs)
        self._config = config
        self._engine_factory = engine_factory
        self._engine: DrafterEngine | None = None
        self._draft_times: DraftTimes = ()
        # request → rank, its epoch, its last step that told of it, when that was
        self._owners: dict[str, tuple[str, str, int, float]] = {}
        self._num_batches = self._num_blocks = self._num_expired = self._num_failed = 0
        self._num_unexpected = self._num_missed = self._failures_in_a_row = 0
        self._draft_time_s = 0.0
        self._next_expiry = 0.0
        self.start()

    @property
    def spec(self) -> DrafterSpec | None:
        return None if self._engine is None else self._engine.spec

    @property
    def draft_times(self) -> DraftTimes:
        return self._draft_times

    def adopt(self, config: ClusterConfig) -> None:
        self._config = config

    def prepare(self) -> str:
        self.enter("loading", str(self._config.model.drafter))
        with tracing.span(tracing.SPAN_LOAD, {tracing.ATTR_DRAFTER: self.seat.name}):
            engine = self._engine_factory(self._config, self.seat)
        self.enter("measuring", "draft times")
        self._draft_times = measure_draft_times(engine, self._config)
        self._engine = engine
        return ""

    # --- a turn -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        commits: list[CommitBatch] = []
        for message in self.link.poll(IDLE_TURN_S):
            match message:
                case CommitBatch():
                    commits.append(message)
                case CloseDraft():
                    # In order: a request may be closed and opened again within one turn.
                    self._draft(commits)
                    commits = []
                    self._close(message.request_ids + self._missed(message))
                case _:
                    self._num_unexpected += 1
                    log.warning("%s got a %s", self.seat.name, type(message).__name__)
        self._draft(commits)
        self._expire(time.monotonic())

    def _draft(self, commits: Sequence[CommitBatch]) -> None:
        for batch in merge_commits(commits):
            now = time.monotonic()
            for request_id in batch.request_ids:
                self._owners[request_id] = (batch.rank.name, batch.rank.epoch, batch.step, now)
            proposals = self._advance(batch)
            if proposals is not None:
                self._num_blocks += len(proposals.request_ids)
                self._draft_time_s += proposals.draft_time_s
                self.link.send(batch.rank, proposals)

    def _advance(self, batch: CommitBatch) -> ProposalBatch | None:
        assert self._engine is not None
        self._num_batches += 1
        started_ns = time.time_ns()
        try:
            proposals = self._engine.advance(batch)
        except Exception:
            # The ranks go on without these blocks; a drafter that only fails starts afresh.
            self._num_failed += 1
            self._failures_in_a_row += 1
            log.exception(
                "%s could not draft for %d requests", self.seat.name, len(batch.request_ids)
            )
            self._close(batch.request_ids)
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise
            return None
        self._failures_in_a_row = 0
        self._trace(batch, started_ns)
        return proposals

    def _trace(self, batch: CommitBatch, started_ns: int) -> None:
        """A span for each traced request that got a block, below its round at the rank."""
        tracer = tracing.tracer()
        if tracer is None:
            return
        attributes: dict[str, str | int] = {
            tracing.ATTR_DRAFTER: self.seat.name,
            tracing.ATTR_RANK: batch.rank.name,
            tracing.ATTR_NUM_REQUESTS: len(batch.request_ids),
        }
        for _, parent in batch.traceparents:
            context = tracing.context_of(parent)
            tracer.start_span(
                tracing.SPAN_DRAFT, context, attributes=attributes, start_time=started_ns
            ).end()

    def _close(self, request_ids: tuple[str, ...]) -> None:
        assert self._engine is not None
        self._engine.close(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _missed(self, message: CloseDraft) -> tuple[str, ...]:
        """Requests of the rank that are over, though nobody said so here."""
        if not message.before_step:  # an ordinary end
            return ()
        missed = tuple(
            request_id
            for request_id, (rank, _, step, _) in self._owners.items()
            if rank == message.rank and step < message.before_step
        )
        self._num_missed += len(missed)
        return missed

    def _expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        self._next_expiry = now + IDLE_TURN_S
        old = tuple(r for r, (*_, seen) in self._owners.items() if now - seen > EXPIRE_AFTER_S)
        if old:
            self._num_expired += len(old)
            log.warning("%s closes %d contexts nobody asked for any more", self.seat.name, len(old))
            self._close(old)

    def meet(self, old: Peers, new: Peers) -> None:
        """Contexts of an incarnation of a rank that is over are of no use to the next one."""
        alive = {(rank.name, rank.epoch) for rank in new.ranks}
        over = {(rank.name, rank.epoch) for rank in old.ranks} - alive
        orphans = tuple(r for r, (name, epoch, *_) in self._owners.items() if (name, epoch) in over)
        if orphans:
            self._close(orphans)

    # --- control ----------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Counts since this incarnation started."""
        return await self.on_loop(self._stats)

    def _stats(self) -> dict[str, Any]:
        assert self._engine is not None
        return {
            "num_batches": self._num_batches,
            "num_blocks": self._num_blocks,
            "num_failed": self._num_failed,
            "num_expired": self._num_expired,
            "num_missed_closes": self._num_missed,
            "num_unexpected": self._num_unexpected,
            "num_refused_calibrations": self._engine.spec.num_refused_calibrations,
            "draft_time_s": self._draft_time_s,
            "open_requests": len(self._engine.open_requests()),
            "link": asdict(self.link.counters),
        }


def merge_commits(commits: Sequence[CommitBatch]) -> list[CommitBatch]:
    """One batch a rank where that changes nothing, so that several steps cost one draft.

    A request that appears again starts a new batch (its rows must be appended in order), and only its last mention
    asks for a block: an earlier one would be for a length that is over.
    """
    merged: list[CommitBatch] = []
    for rank in {batch.rank: None for batch in commits}:  # in order of first mention
        groups: list[list[CommitBatch]] = []
        seen: set[str] = set()
        for batch in (b for b in commits if b.rank == rank):
            if not groups or seen & set(batch.request_ids):
                groups.append([])
                seen = set()
            groups[-1].append(batch)
            seen |= set(batch.request_ids)
        later: set[str] = set()
        of_rank: list[CommitBatch] = []
        for group in reversed(groups):
            batch = _concatenate(group)
            is_last = np.array([r not in later for r in batch.request_ids], bool)
            of_rank.append(_wanting(batch, batch.wants_block & is_last))
            later |= set(batch.request_ids)
        merged += reversed(of_rank)
    return merged


def _wanting(batch: CommitBatch, wants_block: np.ndarray[Any, np.dtype[np.bool_]]) -> CommitBatch:
    return CommitBatch(**{**vars(batch), "wants_block": wants_block})


def _concatenate(batches: Sequence[CommitBatch]) -> CommitBatch:
    if len(batches) == 1:
        return batches[0]
    lengths = np.concatenate([np.diff(b.cu_feature_len) for b in batches])
    cu_feature_len = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_feature_len[1:])
    arrays = (
        *("generations", "committed_lens", "anchor_token_ids", "wants_block", "first_positions"),
        *("token_ids", "features", "verify_lens", "min_survivals"),
    )
    sampling = [b.sampling for b in batches]
    return CommitBatch(
        rank=batches[-1].rank,
        step=batches[-1].step,
        request_ids=tuple(r for b in batches for r in b.request_ids),
        cu_feature_len=cu_feature_len,
        traceparents=tuple(parent for b in batches for parent in b.traceparents),
        sampling=SamplingBatch(
            *(np.concatenate([getattr(s, f) for s in sampling]) for f in vars(sampling[0]))
        ),
        **{name: np.concatenate([getattr(b, name) for b in batches]) for name in arrays},
    )


def measure_draft_times(engine: DrafterEngine, config: ClusterConfig) -> DraftTimes:
    """Median seconds of drafting for 1, 4 and 16 requests, each with a context of 64 tokens."""
    sizes = sorted({min(size, config.target.max_running) for size in (1, 4, 16)})
    return tuple((size, _median_draft_s(engine, size, config.model.dtype)) for size in sizes)


def _median_draft_s(engine: DrafterEngine, num_requests: int, dtype: str) -> float:
    names = tuple(f"profile-{i}" for i in range(num_requests))
    features = np.zeros(engine.spec.feature_dim, np.uint16 if dtype == "bfloat16" else np.float32)
    committed, took = 64, []
    engine.advance(_profile_commit(features, names, 0, committed))
    for _ in range(NUM_TRIALS + 1):
        batch = _profile_commit(features, names, committed - 1, committed + 2)
        committed += 2
        started = time.perf_counter()
        engine.advance(batch)
        took.append(time.perf_counter() - started)
    engine.close(names)
    return float(np.median(took[1:]))  # the first one warms up


def _profile_commit(
    features: np.ndarray[Any, Any], names: tuple[str, ...], first_position: int, committed_len: int
) -> CommitBatch:
    n, rows = len(names), committed_len - 1 - first_position
    greedy = SamplingBatch(
        np.zeros(n, np.float32),
        np.ones(n, np.float32),
        np.zeros(n, np.int32),
        np.zeros(n, np.uint64),
        np.zeros(n, np.int8),
    )
    every = np.tile(features, (n * rows, 1))
    return trial_commit(names, first_position, committed_len, every, greedy)
