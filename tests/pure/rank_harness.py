"""A scripted target and ingress around a real `Rank`.

The target's next token is a fixed function of all tokens before it, read back from a model of the physical KV cache
through the block tables of the plan. A wrong slot, position, chunk boundary or truncation therefore changes tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.core.admission import RankLimits
from actors.core.layout import StepPlan, StepResult
from actors.core.logit_rules import TokenLogprobs
from actors.core.messages import (
    AdmittedRequest,
    CloseDraft,
    CommitBatch,
    Endpoint,
    ProposalBatch,
    Reserve,
    TokenDelta,
    TokenDeltas,
)
from actors.core.prefix_scheduler import allocate
from actors.core.rank import Outgoing, Rank
from actors.core.sampling import SamplingParams
from actors.core.step_decision import StepDecision, VerifyChoice
from actors.core.verify_decision import StepFacts, VerifyDecider
from tests.pure.scripted_drafter import (
    DRAFTER,
    INGRESS,
    RANK,
    VOCAB,
    ScriptedDrafter,
    endpoint,
    true_token,
)


class VerifyAll:
    def choose(self, facts: StepFacts) -> VerifyChoice:
        return VerifyChoice(facts.survivals.size, 0.0, "all")


def make_rank(policy: object = None, **overrides: object) -> Rank:
    values: dict[str, object] = {
        "num_blocks": 256,
        "block_size": 4,
        "max_model_len": 128,
        "vocab_size": VOCAB,
        "max_running": 8,
        "max_waiting": 8,
        "max_batch_tokens": 32,
        "gamma": 3,
        "max_wait_s": 0.25,
        "reservation_ttl_s": 5.0,
    }
    calibration = overrides.pop("calibration", None)
    values.update(overrides)
    limits = RankLimits(**values)  # type: ignore[arg-type]
    decider = VerifyDecider(
        RANK.name,
        RANK.epoch,
        policy or VerifyAll(),  # type: ignore[arg-type]
        allocate,
        getattr(policy, "drafting", None),
    )
    times = getattr(policy, "times", None)
    return Rank(RANK, limits, decider, calibration, times)  # type: ignore[arg-type]


class ScriptedTarget:
    """Greedy verification over a modelled cache. Features of a token are (position, token)."""

    def __init__(self, rank: Rank) -> None:
        self.block_size = rank.limits.block_size
        self.max_batch_tokens = rank.limits.max_batch_tokens
        self.num_slots = rank.limits.num_blocks * self.block_size
        self.kv = np.full((self.num_slots, 2), -1, np.int64)  # position, token
        self.plans: list[StepPlan] = []

    def step(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.batch_tokens <= self.max_batch_tokens
        assert len(np.unique(plan.slot_mapping)) == plan.batch_tokens, "two tokens in one slot"
        self.plans.append(plan)
        self.kv[plan.slot_mapping] = np.stack((plan.positions, plan.token_ids), axis=1)
        num_accepted, next_token = [], []
        for row in range(plan.num_requests):
            accepted, own = self._row(plan, row)
            num_accepted.append(accepted)
            next_token.append(own)
        features = np.stack((plan.positions, plan.token_ids), axis=1).astype(np.float32)
        return StepResult(
            np.array(num_accepted, np.int32), np.array(next_token, np.int32), features
        )

    def _row(self, plan: StepPlan, row: int) -> tuple[int, int]:
        start, end = plan.cu_query_len[row : row + 2].tolist()
        context_len = int(plan.context_len[row])
        assert plan.positions[start:end].tolist() == list(
            range(context_len, context_len + end - start)
        )
        cached = self._cached(plan.block_tables[row], context_len + end - start)
        assert cached[context_len:] == plan.token_ids[start:end].tolist()
        if not plan.samples[row]:
            return 0, -1
        verify_len = int(plan.verify_len[row])
        if plan.draft is not None:
            # The scripted drafter's q is one-hot on its tokens: it must lie beside them.
            q_ids = plan.draft.q_ids[row, :verify_len, 0]
            assert q_ids.tolist() == cached[len(cached) - verify_len :]
        prefix = cached[: len(cached) - verify_len]
        for accepted in range(verify_len + 1):
            own = true_token(prefix)
            if accepted == verify_len or cached[len(prefix)] != own:
                return accepted, own
            prefix.append(own)
        raise AssertionError

    def _cached(self, table: np.ndarray, length: int) -> list[int]:
        positions = np.arange(length)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        assert (self.kv[slots, 0] == positions).all(), "a cached token lies at another position"
        return self.kv[slots, 1].tolist()


def admitted(
    request_id: str,
    prompt: Sequence[int],
    max_new: int,
    stops: Sequence[int] = (),
    num_prior: int = 0,
    generation: int = 0,
    reply_to: Endpoint = INGRESS,
    **sampling: object,
) -> AdmittedRequest:
    return AdmittedRequest(
        request_id,
        generation,
        reply_to,
        np.array(prompt, np.int32),
        num_prior,
        max_new,
        SamplingParams(temperature=0.0, **sampling),  # type: ignore[arg-type]
        tuple(stops),
    )


def reserve(request_id: str, prompt_len: int, max_new: int) -> Reserve:
    return Reserve(request_id, INGRESS, prompt_len, max_new)


@dataclass
class Stream:
    """What an ingress has seen of one request; complains about gaps, repeats and anything after the end."""

    first_index: int = 0
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    last: TokenDelta | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        assert self.reason is None, f"a delta after the end: {delta}"
        assert delta.first_index == self.first_index + len(self.tokens), delta
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.reason, self.last = delta.finish_reason, delta


class Session:
    """A rank, its target and a drafter in one thread, with perfect delivery and a clock of its own.

    Both are scripted unless real engines are given.
    """

    def __init__(
        self,
        rank: Rank,
        error: float = 0.3,
        seed: int = 0,
        draft_s: float = 0.0,
        target: Any = None,
        drafter: Any = None,
    ) -> None:
        self.rank = rank
        scripted = ScriptedDrafter(DRAFTER, rank.limits.gamma, error, random.Random(seed))
        self.target = target or ScriptedTarget(rank)
        self.drafter = drafter or scripted
        self.streams: dict[str, Stream] = {}
        self.now = 0.0
        self.draft_s = draft_s
        self.sent: Outgoing = []
        self.decisions: list[StepDecision] = []
        rank.set_drafters([DRAFTER] if rank.limits.gamma else [])

    def deliver(self, out: Outgoing, drafts: bool = True) -> None:
        """Hand messages to their receivers; proposals come straight back."""
        self.sent += out
        for _, message in out:
            if isinstance(message, TokenDeltas):
                for delta in message.deltas:
                    self.streams.setdefault(delta.request_id, Stream()).take(delta)
            elif isinstance(message, CloseDraft):
                self.drafter.close(message.request_ids)
            elif isinstance(message, CommitBatch):
                proposal = self.drafter.advance(message)
                if proposal is not None and drafts:
                    self.now += self.draft_s
                    self.rank.on_message(proposal, self.now)

    def submit(self, message: AdmittedRequest) -> None:
        self.streams[message.request_id] = Stream(message.num_prior_tokens)
        self.deliver(self.rank.on_message(message, self.now))

    def step(self, drafts: bool = True) -> StepPlan | None:
        plan = self.rank.plan_step(self.now)
        if plan is None:
            return None
        assert self.rank._in_flight is not None
        self.decisions.append(self.rank._in_flight.decision)
        result = self.target.step(plan)
        self.now += 0.01
        self.deliver(self.rank.apply(plan, result, self.now, 0.01), drafts)
        return plan

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if self.step() is None:
                if self.rank.is_idle:
                    return
                assert self.rank.deadline is not None, "stuck: nothing runs and nothing is awaited"
                self.now = max(self.now, self.rank.deadline)
        raise AssertionError("it never ends")


def prefilled(**overrides: object) -> tuple[Session, CommitBatch]:
    """A session whose request "a" waits for its first block, and the commit that asked for it."""
    session = Session(make_rank(**overrides), error=0.0)
    session.submit(admitted("a", [3, 1, 4, 1, 5], 30))
    session.step(drafts=False)
    (commit,) = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    return session, commit


def proposal_for(session: Session, commit: CommitBatch) -> ProposalBatch:
    drafter = ScriptedDrafter(DRAFTER, session.rank.limits.gamma, 0.0, session.drafter.rng)
    batch = drafter.advance(commit)
    assert batch is not None
    return batch


def two_requests_two_drafters(**overrides: object) -> tuple[Session, Endpoint]:
    session = Session(make_rank(**overrides), error=0.0)
    other = endpoint("drafter-1", "drafter")
    session.rank.set_drafters([DRAFTER, other])
    return session, other
