"""The ragged layout of one step: what the batching decides and what the engine computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from actors.core.logit_rules import TokenLogprobs
from actors.core.sampling import SamplingBatch, SamplingParams


@dataclass(frozen=True)
class DraftTokens:
    """The distributions behind the scheduled draft tokens of a step, padded to the longest (C2).

    Only slots `k < verify_len[r]` are read. The tokens themselves lie in `StepPlan.token_ids`.
    """

    q_ids: npt.NDArray[np.int32]  # [R, max_verify_len, draft_top_k] support; pad with -1
    q_probs: npt.NDArray[np.float32]  # [R, max_verify_len, draft_top_k] sums to 1 over support


@dataclass(frozen=True)
class SpecialRow:
    """A row that samples with logit rules or reports log probabilities: what these need to know of its request."""

    row: int  # of the plan
    request_id: str
    generation: int
    sampling: SamplingParams
    token_ids: npt.NDArray[
        np.int32
    ]  # [committed_len] prompt and output; the last one is the anchor
    num_output: int  # how many of them are output
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """One flattened target forward over R rows (requests) and B tokens.

    A row is either a chunk of prefill (verify_len 0, any query_len) or a round: the anchor followed by `verify_len`
    draft tokens (query_len = 1 + verify_len). A row with `samples` false is a prefill chunk that does not end its
    prompt; it yields features but no token.
    """

    step: int
    request_ids: tuple[str, ...]  # [R]
    token_ids: npt.NDArray[np.int32]  # [B]
    positions: npt.NDArray[np.int32]  # [B] absolute
    cu_query_len: npt.NDArray[np.int32]  # [R + 1]
    context_len: npt.NDArray[np.int32]  # [R] tokens whose K/V lie in the cache before this step
    block_tables: npt.NDArray[np.int32]  # [R, max_blocks] physical block ids, padded with 0
    slot_mapping: npt.NDArray[np.int32]  # [B] physical slot = block_id * block_size + offset
    verify_len: npt.NDArray[np.int32]  # [R]
    samples: npt.NDArray[np.bool_]  # [R]
    sampling: SamplingBatch  # R rows
    draft: DraftTokens | None = None  # None when no row verifies anything
    token_bound: int = 0
    """Tokens the rounds of this step have at most under their lagged budget, whatever was drafted since; 0: not known.
    An engine that pads steps to a size chooses it by this, so that the size tells nothing of current drafts (C3)."""

    special: tuple[SpecialRow, ...] = ()  # of the rows that sample; most steps have none

    def __post_init__(self) -> None:
        query_len = np.diff(self.cu_query_len)
        assert self.cu_query_len[0] == 0 and self.cu_query_len[-1] == len(self.token_ids)
        assert len(self.positions) == len(self.token_ids)
        assert (query_len >= 1 + self.verify_len).all(), (
            f"query_len {query_len} verify_len {self.verify_len}"
        )
        assert (self.verify_len[~self.samples] == 0).all()
        assert self.verify_len.max(initial=0) == 0 or self.draft is not None
        assert len(self.slot_mapping) == len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)

    @property
    def batch_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class StepResult:
    """What the target made of a `StepPlan`."""

    num_accepted: npt.NDArray[np.int32]  # [R] draft tokens accepted, 0 for prefill rows
    next_token: npt.NDArray[np.int32]  # [R] recovered or bonus token; -1 where `samples` is false
    features: npt.NDArray[np.uint16] | npt.NDArray[np.float32] | None = field(default=None)
    """[B, num_taps * hidden] tapped outputs of every token of the step; bf16 as uint16 bits. None without taps."""
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For the rows of the plan that ask: one entry for each accepted token and the target's own."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Rows of the plan whose request cannot go on, and why; their tokens mean nothing."""
    shared_time_s: float | None = None
    """Of the step, what a lockstep group did together, waiting for others included; None: not told apart."""
