"""The life of a request on its rank: reserved, waiting, prefilling, running, finished.

Words about lengths: `committed_len` counts the prompt and every committed output token; `context_len` counts the tokens
whose K/V lie in the cache. A running request always has `context_len == committed_len - 1`: the anchor's K/V is written
by the round that verifies behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from actors.core.explain import RequestLog
from actors.core.kv_blocks import BlockLease
from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import AdmittedRequest, Endpoint, FinishReason, TokenDelta


class Phase(Enum):
    WAITING = "waiting"  # admitted, or preempted; no place in the batch, no blocks
    PREFILLING = "prefilling"
    RUNNING = "running"  # one round a step
    FINISHED = "finished"


@dataclass(frozen=True)
class Reservation:
    """A place in line for a request that has not arrived yet; it frees itself at `expires_at`."""

    request_id: str
    reply_to: Endpoint
    prompt_len: int
    expires_at: float  # seconds on the caller's clock


def cut_at_stop(
    token_ids: Sequence[int], stop_token_ids: frozenset[int], num_remaining: int
) -> tuple[Sequence[int], FinishReason | None]:
    """The part of a committed run that belongs to the stream, and why the stream ends with it.

    Conditions are checked at every token in order, so an earlier stop token wins over a later length cap; a stop token
    that is also the last token allowed ends the stream with "stop". The stop token is part of the run.
    """
    for index, token_id in enumerate(token_ids[:num_remaining]):
        if token_id in stop_token_ids:
            return token_ids[: index + 1], "stop"
    if len(token_ids) >= num_remaining:
        return token_ids[:num_remaining], "length"
    return token_ids, None


class Request:
    """One admitted request. Owns its committed tokens and, while it has a slot, its block lease.

    `num_output` counts output tokens from the start of the stream, those of earlier ranks (`num_prior_tokens`) too.
    The counters cover this rank only.
    """

    __slots__ = (
        "_lease",
        "admitted",
        "arrival",
        "committed_len",
        "context_len",
        "digests",
        "drafter",
        "log",
        "num_accepted",
        "num_cached",
        "num_named",
        "num_output",
        "num_proposed",
        "num_rounds",
        "num_scheduled",
        "phase",
        "prefill_len",
        "prompt_len",
        "request_id",
        "slot",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, admitted: AdmittedRequest, arrival: int) -> None:
        self.admitted = admitted
        self.request_id = admitted.request_id
        self._lease: BlockLease | None = None
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.slot = -1
        self.drafter: str | None = None  # the drafter that holds its context
        self.prompt_len = len(admitted.prompt_ids)
        self.token_ids: npt.NDArray[np.int32] = np.empty(worst_case_len(admitted), np.int32)
        self.token_ids[: self.prompt_len] = admitted.prompt_ids
        self.committed_len = self.prompt_len
        self.prefill_len = self.prompt_len  # tokens to compute before it can run
        self.context_len = 0
        self.num_cached = 0  # tokens of its prompt that another request had computed
        self.digests: list[
            bytes
        ] = []  # of its blocks from the first one on, as far as they were asked for
        self.num_named = 0  # leading blocks of its lease that the pool knows by content
        self.num_output = admitted.num_prior_tokens
        self.stop_token_ids = frozenset(admitted.stop_token_ids)
        self.num_rounds = self.num_proposed = self.num_scheduled = self.num_accepted = 0
        self.log: RequestLog | None = None  # of its rounds, where somebody wants one

    @property
    def generation(self) -> int:
        return self.admitted.generation

    @property
    def lease(self) -> BlockLease:
        """Its blocks; only a request with a slot has any."""
        assert self._lease is not None, f"{self.request_id} holds no blocks"
        return self._lease

    @property
    def num_remaining(self) -> int:
        """Tokens it may still produce."""
        return self.admitted.max_new_tokens - self.num_output

    @property
    def num_prefill_left(self) -> int:
        return self.prefill_len - self.context_len

    @property
    def can_use_drafts(self) -> bool:
        """Whether a round that is still to come could verify a draft token (the last token of a stream never does)."""
        num_before_last_round = 1 if self.phase is Phase.RUNNING else 2
        return self.admitted.sampling.speculation and self.num_remaining > num_before_last_round

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def finish_before_start(self) -> FinishReason | None:
        """Why a replayed request has nothing left to do: its last delta was lost with the rank that sent it."""
        if (
            self.admitted.num_prior_tokens
            and int(self.token_ids[self.prompt_len - 1]) in self.stop_token_ids
        ):
            return "stop"
        return "length" if self.num_remaining <= 0 else None

    def start(self, slot: int, lease: BlockLease) -> None:
        """Take a place in the batch, and blocks for at least what has to be computed first."""
        assert self.phase is Phase.WAITING, f"{self.request_id} starts while {self.phase.value}"
        self.slot, self._lease = slot, lease
        self.phase = Phase.PREFILLING

    def preempt(self) -> None:
        """Give up slot and blocks for a while. What is committed stays, and will be computed like a prompt."""
        assert self.phase in (Phase.PREFILLING, Phase.RUNNING)
        self.give_back()
        self.slot = -1
        self.prefill_len = self.committed_len
        self.context_len = self.num_named = 0
        self.phase = Phase.WAITING

    def give_back(self) -> None:
        """Release its blocks, if it has any."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def advance_prefill(self, chunk_len: int) -> None:
        assert self.phase is Phase.PREFILLING and 0 < chunk_len <= self.num_prefill_left
        self.context_len += chunk_len

    def skip_prefill(self, num_tokens: int) -> None:
        """The K/V of the next `num_tokens` prompt tokens lie in its blocks already."""
        assert self.phase is Phase.PREFILLING and 0 < num_tokens < self.num_prefill_left
        self.context_len += num_tokens
        if self.prefill_len == self.prompt_len:
            self.num_cached += num_tokens

    def commit(self, token_ids: list[int]) -> tuple[Sequence[int], FinishReason | None]:
        """Append what a step committed; returns the part that entered the stream, and why it ended.

        Raises no error: the caller has checked that the step belongs to this request.
        """
        emitted, reason = cut_at_stop(token_ids, self.stop_token_ids, self.num_remaining)
        count = len(emitted)
        self.token_ids[self.committed_len : self.committed_len + count] = emitted
        self.committed_len += count
        self.context_len = self.committed_len - 1
        self.num_output += count
        if reason is None:
            self.phase = Phase.RUNNING
        return emitted, reason

    def finish(self) -> None:
        assert self.phase is not Phase.FINISHED, f"{self.request_id} finishes twice"
        self.phase = Phase.FINISHED

    def delta(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        error: str = "",
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> TokenDelta:
        """The message about the last `len(token_ids)` tokens of the stream.

        A stop token is included, as the last one, when `finish_reason` is "stop": it counts as a completion token and
        the ingress keeps it in its journal, but shows no text for it.
        """
        return TokenDelta(
            self.request_id,
            self.admitted.generation,
            self.num_output - len(token_ids),
            tuple(token_ids),
            finish_reason,
            self.num_rounds,
            self.num_proposed,
            self.num_scheduled,
            self.num_accepted,
            error,
            tuple(logprobs[: len(token_ids)]),
            self.num_cached,
        )


def worst_case_len(admitted: AdmittedRequest) -> int:
    """Prompt (prior tokens included) plus every token that may still come."""
    still_to_come = max(0, admitted.max_new_tokens - admitted.num_prior_tokens)
    return len(admitted.prompt_ids) + still_to_come
