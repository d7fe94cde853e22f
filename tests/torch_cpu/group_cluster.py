"""A group of real shells in this process: target ranks over gloo, a drafter each, links on loopback. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from actors.core.lockstep import GroupBook, StepLayout
from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    CommitBatch,
    ProposalBatch,
    ReservationReply,
    Reserve,
    TokenDelta,
    TokenDeltas,
)
from actors.core.own_profile import StepTimes
from actors.core.sampling import SamplingParams
from actors.drafter import DrafterActor
from actors.engine.base import DrafterSpec
from actors.engine.expert_group import ExpertGroup
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.link import Membership, ZmqLink
from actors.peers import DrafterFacts, Peers, Seat
from actors.shell import Shell
from actors.target import TargetActor
from configs.schema import ClusterConfig

GAMMA, TAPS = 3, (0, 1)
MAX_MODEL_LEN = 128
WITHIN_S = 90.0


def until(condition: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the group stands still"
        time.sleep(0.005)
    return value


class TextDrafter:
    """Proposes what each stream will be with every third token wrong; late for requests whose id begins with `late`.

    Args:
        texts: prompt and output of every stream by the first part of its id; of others it proposes zeros.
        jitter: adds noise to confidences, as a rank that computes differently would.
    """

    def __init__(self, seat: Seat, texts: Mapping[str, list[int]], jitter: float) -> None:
        self.spec = DrafterSpec(seat.name, GAMMA, 1, 2 * 64, TAPS, "text")
        self._texts, self._jitter = texts, jitter
        self._rng = np.random.default_rng(0)
        self._open: set[str] = set()

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        self._open |= set(batch.request_ids)
        wanted = np.flatnonzero(batch.wants_block)
        if any(request_id.startswith("late") for request_id in batch.request_ids):
            time.sleep(0.1)  # twice what a rank waits
        if not len(wanted):
            return None
        draft = np.zeros((len(wanted), GAMMA), np.int32)
        for row, i in enumerate(wanted):
            text, at = self._texts.get(batch.request_ids[i], []), int(batch.committed_lens[i])
            known = text[at : at + GAMMA]
            draft[row, : len(known)] = known
            draft[row, 2] = (draft[row, 2] + (at % 3 == 0)) % 150
        noise = self._jitter * self._rng.random(draft.shape)
        confidences = np.clip(np.array([0.9, 0.8, 0.3]) - noise, 0.01, 1.0)
        return ProposalBatch(
            drafter=self.spec.name,
            request_ids=tuple(batch.request_ids[i] for i in wanted),
            generations=batch.generations[wanted],
            committed_lens=batch.committed_lens[wanted],
            draft_token_ids=draft,
            confidences=confidences.astype(np.float32),
            q_ids=draft[:, :, None].copy(),
            q_probs=np.ones((*draft.shape, 1), np.float32),
            draft_time_s=0.0,
        )

    def close(self, request_ids: tuple[str, ...]) -> None:
        self._open -= set(request_ids)

    def open_requests(self) -> tuple[str, ...]:
        return tuple(self._open)


def group_config(
    model_dir: Path,
    size: int,
    dispatch: str = "all_gather",
    policy: str = "static_length",
    bound_s: float = 60.0,
    rebalance_steps: int = 0,
) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {
                "path": str(model_dir),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
            },
            "target": {
                "num_ranks": size,
                "group_size": size,
                "dispatch": dispatch,
                "collective_timeout_s": bound_s,
                "rebalance_steps": rebalance_steps,
                "redundant_experts": 1,
                "kv_cache_tokens": 1024,
                "block_size": 8,
                "max_running": 8,
                "max_batch_tokens": 16,  # prompts come in several chunks
            },
            "drafter": {"gamma": GAMMA, "draft_top_k": 1, "max_wait_ms": 50.0},
            "policy": {"name": policy, "static_length": GAMMA},
        }
    )


class GroupCluster:
    """`size` ranks and drafters, formed and introduced to each other. Use as a context manager.

    Attributes:
        layouts: of every rank, all that its group agreed on.
        failures: causes of shells that ended on their own.
    """

    def __init__(
        self, config: ClusterConfig, texts: Mapping[str, list[int]], jitter: float = 0.0
    ) -> None:
        self.config, self.size = config, config.target.num_ranks
        self.layouts: list[list[StepLayout]] = [[] for _ in range(self.size)]
        self.failures: list[str] = []
        self._membership = Membership.create()
        self.deltas: dict[str, list[TokenDelta]] = {}
        self._replies: dict[str, ReservationReply] = {}
        self.client = ZmqLink("client", "ingress", self._membership, "127.0.0.1")
        self._params: dict[str, tuple[int, np.ndarray, int, SamplingParams]] = {}
        fail: Any = lambda _ready, cause: self.failures.append(cause)  # noqa: E731
        self.drafters: list[Any] = [
            DrafterActor(
                self._seat(f"drafter-{i}", i),
                config,
                # One rank's confidences differ from what another would compute.
                lambda _config, seat, i=i: TextDrafter(seat, texts, jitter * i),
                on_failure=fail,
            )
            for i in range(self.size)
        ]
        self.ranks: list[Any] = [
            TargetActor(
                self._seat(f"target-{i}", i), config, self._engine, step_times, on_failure=fail
            )
            for i in range(self.size)
        ]

    def _seat(self, name: str, rank: int) -> Seat:
        return Seat(name, self._membership, "127.0.0.1", rank=rank)

    def _engine(self, config: ClusterConfig, seat: Seat) -> TorchTargetEngine:
        if config.target.group_size == 1:
            return load_engine(config, TAPS)
        group = ExpertGroup(seat.rank, self.size)
        agree = group.agree

        def recorded(*arguments: Any, **options: Any) -> StepLayout:
            self.layouts[seat.rank].append(agree(*arguments, **options))
            return self.layouts[seat.rank][-1]

        group.agree = recorded  # type: ignore[method-assign]
        return load_engine(config, TAPS, group=group)

    def __enter__(self) -> GroupCluster:
        if self.size > 1:
            self._form()
        for shell in [*self.ranks, *self.drafters]:
            until(lambda shell=shell: self._phase(shell) == "ready")
        for rank, drafter in zip(self.ranks, self.drafters, strict=True):
            said = asyncio.run(drafter.describe())
            facts = DrafterFacts(said.endpoint, said.spec, said.draft_times)
            peers = Peers(1, ranks=(rank.link.endpoint,), drafters=(facts,))
            asyncio.run(rank.connect(peers))
            asyncio.run(drafter.connect(peers))
        return self

    def _form(self) -> None:
        book = GroupBook(tuple(rank.seat.name for rank in self.ranks), epoch=0)

        def formed() -> Any:
            said = [asyncio.run(rank.describe()) for rank in self.ranks]
            return book.form(
                [
                    (d.endpoint.epoch, d.offer) if d.phase == "forming" and d.offer else None
                    for d in said
                ]
            )

        for rank, formation in zip(self.ranks, until(formed), strict=True):
            asyncio.run(rank.form(formation))

    def _phase(self, shell: Shell) -> str:
        assert not self.failures, self.failures
        return asyncio.run(shell.describe()).phase

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            await asyncio.gather(*(shell.stop() for shell in [*self.ranks, *self.drafters]))

        asyncio.run(stop())
        self.client.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, request_id: str, rank: int, prompt: list[int], num_tokens: int, params: SamplingParams
    ) -> None:
        """Ask for a place; `poll` sends the request when it is granted."""
        ids = np.array(prompt, np.int32)
        self._params[request_id] = (rank, ids, num_tokens, params)
        me = self.client.endpoint
        endpoint = self.ranks[rank].link.endpoint
        self.client.send(endpoint, Reserve(request_id, me, len(ids), num_tokens))

    def poll(self) -> None:
        assert not self.failures, self.failures
        for message in self.client.poll(0.01):
            if isinstance(message, ReservationReply):
                assert message.granted, message.reason
                rank, ids, num_tokens, params = self._params[message.request_id]
                admitted = AdmittedRequest(
                    message.request_id, 0, self.client.endpoint, ids, 0, num_tokens, params
                )
                self.client.send(self.ranks[rank].link.endpoint, admitted)
            elif isinstance(message, TokenDeltas):
                for delta in message.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)

    def abort(self, request_id: str) -> None:
        endpoint = self.ranks[self._params[request_id][0]].link.endpoint
        self.client.send(endpoint, AbortRequest(request_id, 0))

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas.get(request_id, []) for token in delta.token_ids]

    def reason(self, request_id: str) -> str | None:
        deltas = self.deltas.get(request_id)
        return deltas[-1].finish_reason if deltas else None

    def finish(self, *request_ids: str) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not all(self.reason(request_id) for request_id in request_ids):
            assert time.monotonic() < deadline, f"the group stands still: {self.deltas.keys()}"
            self.poll()

    def agreed(self) -> list[StepLayout]:
        """The layouts so far, after checking that all ranks hold the same ones."""
        shortest = min(len(of_rank) for of_rank in self.layouts)
        first = self.layouts[0][:shortest]
        assert all(of_rank[:shortest] == first for of_rank in self.layouts)
        return first


def step_times(_engine: Any, _config: ClusterConfig) -> StepTimes:
    tokens = np.array([1, 2, 4, 8, 16])
    return StepTimes(tokens, np.minimum(tokens, 4), 0.002 + 1e-5 * tokens)
