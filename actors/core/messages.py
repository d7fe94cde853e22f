"""Every message between processes, grouped by the receiver.

Rules (contract C4). A message about a request carries its `generation` (bumped each time the ingress re-submits it) and
a committed length: one that is late, repeated or reordered is recognised and dropped, never repaired. All messages are
idempotent; batches are structs of arrays, one message a step, not one a request.

Lengths: `committed_len` counts prompt plus committed output tokens. The anchor is the last of them, at position
`committed_len - 1` of the stream; the draft context of a request covers positions `0 .. committed_len - 2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from actors.core.endpoint import Endpoint as Endpoint
from actors.core.logit_rules import TokenLogprobs
from actors.core.sampling import SamplingBatch, SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "abort", "error"]


# --- received by a target rank --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reserve:
    """Ask for KV for `prompt_len` tokens, prior ones included, plus `max_new_tokens` to come, and a place in line."""

    request_id: str
    reply_to: Endpoint
    prompt_len: int
    max_new_tokens: int


@dataclass(frozen=True)
class AdmittedRequest:
    """A validated request with its reservation; token indices and position keys go on after what the client has."""

    request_id: str
    generation: int
    reply_to: Endpoint
    prompt_ids: Int32  # the prompt, then the tokens the client already has
    num_prior_tokens: int  # how many those are
    max_new_tokens: int  # to come
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    traceparent: str | None = None
    class_id: int = 0  # index into `policy.classes`
    explain: bool = False  # keep a log of its rounds (C11)
    priority: int = 0  # of those that wait for a place, the lowest starts first


@dataclass(frozen=True)
class AbortRequest:
    """The client has gone, a stop string was found, or the time is up. Frees KV and draft state within one step."""

    request_id: str
    generation: int


@dataclass(frozen=True)
class ProposalBatch:
    """Draft blocks of several requests (N of them), from the drafter with the endpoint name `drafter`.

    `q_ids` / `q_probs`: the support sampled from, its exact probabilities (C2); one-hot if greedy or not drafted."""

    drafter: str
    request_ids: tuple[str, ...]
    generations: Int32  # [N]
    committed_lens: Int32  # [N]
    draft_token_ids: Int32  # [N, gamma]
    confidences: Float32  # [N, gamma] calibrated conditional acceptance
    q_ids: Int32  # [N, gamma, draft_top_k]
    q_probs: Float32  # [N, gamma, draft_top_k]
    draft_time_s: float
    draft_lens: Int32 | None = None  # [N] slots drafted; behind them confidence 0. None: all


@dataclass(frozen=True)
class VerifyBudget:
    """How many draft tokens a rank may verify, decided from survivals at least two steps old (C3)."""

    rank: str
    epoch: str
    based_on_step: int
    for_step: int
    expires_step: int
    max_draft_tokens: int  # K
    min_survival: float  # price lambda; with class weights it is a worth, survival times weight
    rule: str = "lagged"
    class_weights: tuple[float, ...] = ()  # of `policy.classes`; empty: not weighed
    policy_number: int = 0  # of the policy it was planned under

    def __post_init__(self) -> None:
        if self.based_on_step > self.for_step - 2:
            raise AnticipatingBudgetError(
                f"based_on_step={self.based_on_step} for_step={self.for_step}: use a StepReport at least two steps old"
            )


class AnticipatingBudgetError(ValueError):
    """A verification budget was derived from confidences too fresh to keep the output distribution (C3)."""


# --- received by a drafter ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommitBatch:
    """What one step committed for the requests of one drafter, and which of them want a block next.

    `features`: tapped layer outputs of the committed rows, request i's from `cu_feature_len[i]` on, for positions
    `first_positions[i]` to `committed_lens[i] - 2`, earlier steps' too at times; a gap starts the context anew.
    """

    rank: Endpoint
    step: int
    request_ids: tuple[str, ...]
    generations: Int32  # [N]
    committed_lens: Int32  # [N]
    anchor_token_ids: Int32  # [N]
    wants_block: npt.NDArray[np.bool_]  # [N] False while a long prompt is still being prefilled
    first_positions: Int32  # [N]
    cu_feature_len: Int32  # [N + 1]
    token_ids: Int32  # [sum] of these rows; behind a request's last one comes its anchor
    features: npt.NDArray[np.uint16] | Float32  # [sum, num_taps * hidden]; uint16: bits of bfloat16
    verify_lens: Int32  # [N] draft tokens this step verified
    sampling: SamplingBatch  # N rows
    min_survivals: (
        Float32  # [N] a block may end where its survival falls below (`draft_stop`); 0: it is whole
    )
    traceparents: tuple[tuple[str, str], ...] = ()  # (traced request, span of its round)


@dataclass(frozen=True)
class CloseDraft:
    """These requests are over (or moved away). `before_step` above 0: so is what was last told of before that step."""

    rank: str
    request_ids: tuple[str, ...]
    before_step: int = 0


# --- received by the allocator --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """What one rank did in one step. `survivals` are those current at `step`: they may steer step + 2 and later."""

    rank: Endpoint
    step: int
    step_time_s: float  # forward, acceptance and commit
    draft_wait_s: float  # time the rank stood waiting for proposals before this step
    num_requests: int
    num_prefill_tokens: int
    batch_tokens: int
    context_tokens: int
    survivals: Float32  # [R, gamma]; a row of zeros for a request without a proposal
    num_proposed: Int64  # [gamma] this step, per position
    num_scheduled: Int64  # [gamma]
    num_accepted: Int64  # [gamma]
    num_committed: int
    num_free_blocks: int
    num_blocks: int
    num_waiting: int
    budget_rule: str
    budget_used: int
    class_ids: Int32 | None = None  # [R]; None: all of the first class
    row_committed: Int32 | None = None  # [R] tokens of each round; None: not told
    shared_time_s: float | None = None  # of step_time_s, done by all together; None: unknown
    max_running: int = 0  # requests that have room in a step, the rest waits; 0: not told


@dataclass(frozen=True)
class RankProfile:
    """The measured cost curve of a rank, with the identity it belongs to. Sent at start and on request."""

    rank: Endpoint
    identity: str
    batch_tokens: Int32  # [G] ascending
    num_requests: Int32  # [G]
    step_time_s: npt.NDArray[np.float64]  # [G] median seconds of a complete step
    draft_time_s: npt.NDArray[np.float64]  # [G] median seconds of drafting for num_requests
    gamma: int
    shared_time_s: npt.NDArray[np.float64] | None = None  # [G] see `StepReport`


@dataclass(frozen=True)
class Subscribe:
    """An ingress (or a dashboard) wants the load view; repeated every second as a heartbeat."""

    subscriber: Endpoint


# --- received by an ingress replica ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReservationReply:
    """`granted`, or why not and when to try again."""

    rank: str
    request_id: str
    granted: bool
    reason: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one request. `first_index` counts output tokens from the start of the stream, prior ones too."""

    request_id: str
    generation: int
    first_index: int
    token_ids: tuple[int, ...]  # a stop token too: it counts, without text
    finish_reason: FinishReason | None = None
    num_rounds: int = 0  # cumulative for the request on this rank
    num_proposed: int = 0
    num_scheduled: int = 0
    num_accepted: int = 0  # those that entered the stream
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, where they were asked for
    num_cached: int = 0  # prompt tokens whose K/V the rank had already


@dataclass(frozen=True)
class TokenDeltas:
    """Everything one rank has for one ingress replica after one step (C9)."""

    rank: str
    epoch: str
    step: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True)
class RankLoad:
    rank: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    predicted_tpot_s: float  # time per output token a new request would see
    age_s: float
    budget: VerifyBudget | None = None  # the last one published
    prediction_error: float | None = None  # relative, of its steps (a group's in common)
    num_fallback_steps: int = 0  # steps decided without a search, for want of a curve to trust


@dataclass(frozen=True)
class LoadView:
    """The allocator's picture of all ranks; routers choose by it. Advisory."""

    version: int
    ranks: tuple[RankLoad, ...] = ()
    num_refused_curves: int = 0  # flat, without points, damaged, or of another identity


# --- control: what the supervisor's `routing()` answers  ------------------------------------------------------


@dataclass(frozen=True)
class RankRoute:
    """One member as the supervisor knows it. A new incarnation has another `endpoint.epoch`."""

    endpoint: Endpoint
    state: Literal["starting", "ready", "draining", "parked", "dead"]
    reason: str = ""  # why it is not ready, for /health
    warning: str = ""  # what a user should know of a rank that serves all the same
    integrity_problems: tuple[str, ...] = ()  # what its last idle check found left behind
    revision: int = 1  # of the settings it runs


@dataclass(frozen=True)
class RoutingTable:
    """Where streams may go. `version` rises with every change; an older table is ignored."""

    version: int
    ranks: tuple[RankRoute, ...] = ()
    allocator: Endpoint | None = None
    max_model_len: int = 0  # what the loaded target allows, in tokens; 0 = not known yet
    others: tuple[RankRoute, ...] = ()  # drafters and the allocator
    num_places: int = 0  # requests that all ranks run at once, parked ones too; 0: not told
    num_ingress: int = 1  # replicas that share what an API key may use


Message = (
    Reserve | AdmittedRequest | AbortRequest | ProposalBatch | VerifyBudget | CommitBatch | CloseDraft | StepReport
    | RankProfile | Subscribe | ReservationReply | TokenDeltas | LoadView
)  # fmt: skip
