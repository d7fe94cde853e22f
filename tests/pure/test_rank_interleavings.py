"""Any order of admissions, aborts, lost, late, repeated and reordered messages: every stream is the oracle's.

The world below delivers messages in any order it likes (but those from the rank to one receiver in order, as a link
does), lets drafters die and restart, and hands messages to the rank while a step is under way too.
"""

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.messages import (
    AbortRequest,
    AdmittedRequest,
    CloseDraft,
    CommitBatch,
    Endpoint,
    Message,
    ProposalBatch,
    ReservationReply,
    StepReport,
    TokenDeltas,
    VerifyBudget,
)
from actors.core.rank import Outgoing
from actors.core.verify_decision import DraftChoice, DraftFacts
from tests.pure.rank_harness import ScriptedTarget, Stream, VerifyAll, admitted, make_rank, reserve
from tests.pure.scripted_drafter import ALLOCATOR, INGRESS, RANK, ScriptedDrafter, endpoint, oracle

SHARED = [
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    5,
    3,
    5,
    8,
    9,
    7,
    9,
    3,
    2,
    3,
    8,
    4,
]  # what many prompts begin with


class Whims:
    """Asks whom it likes for a block."""

    rule = "whims"

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def note(self, step: int, survivals: np.ndarray) -> None:
        assert len(survivals) and step >= 0

    def restart(self) -> None:
        pass

    def choose(self, facts: DraftFacts) -> DraftChoice:
        assert 0 < facts.num_askable <= facts.num_rounds
        return DraftChoice(self.rng.random(facts.num_askable) < self.rng.choice([0.0, 0.5, 1.0]))


class VerifyAllOfSome(VerifyAll):
    def __init__(self, seed: int) -> None:
        self.drafting = Whims(seed)


class World:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.gamma = rng.choice([0, 1, 2, 3, 5])
        self.rank = make_rank(
            rng.choice([VerifyAll(), VerifyAllOfSome(seed)]),
            gamma=self.gamma,
            block_size=rng.choice([1, 3, 4, 16]),
            num_blocks=rng.choice([60, 200]),
            max_model_len=60,
            max_running=rng.choice([1, 2, 5, 9]),
            max_waiting=rng.choice([0, 4]),
            max_batch_tokens=rng.choice([2, 5, 8, 16, 40]),
            max_wait_s=rng.choice([0.0, 0.02, 0.25]),
        )
        self.rank.allocator = ALLOCATOR
        self.target = ScriptedTarget(self.rank)
        self.error = rng.choice([0.0, 0.2, 0.7])
        self.trouble = rng.choice([0.0, 0.1, 0.4])  # how often a message is lost, repeated or late
        self.drafters: dict[str, ScriptedDrafter] = {}
        self.restarts = 0
        self.now = 0.0
        self.inbox: list[Message] = []  # to the rank, not yet delivered
        self.requests: dict[str, AdmittedRequest] = {}
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.streams: dict[str, Stream] = {}
        self.aborted: set[str] = set()
        self.change_drafters()

    # --- the others ---

    def change_drafters(self) -> None:
        alive: list[Endpoint] = []
        for name in ("drafter-0", "drafter-1"):
            old = self.drafters.pop(name, None)
            if self.rng.random() < 0.3:
                continue
            if old is not None and self.rng.random() < 0.5:
                drafter = old
            else:
                self.restarts += 1
                me = endpoint(name, "drafter", str(self.restarts))
                drafter = ScriptedDrafter(me, max(1, self.gamma), self.error, self.rng)
            self.drafters[name] = drafter
            alive.append(drafter.me)
        self.rank.set_drafters(alive)

    def new_request(self) -> None:
        rng, name = self.rng, f"r{len(self.requests)}"
        prompt = [rng.randrange(50) for _ in range(rng.choice([1, 2, 5, 8, 17, 30]))]
        shared = rng.choice([0, 0, 5, 9, 20])
        prompt = [*SHARED[:shared], *prompt[shared:], prompt[0]]
        max_new = rng.choice([1, 2, 3, 7, 20])
        full, _ = oracle(prompt, max_new)
        stops = [rng.choice(full)] if rng.random() < 0.4 else []
        tokens, reason = oracle(prompt, max_new, stops)
        num_prior = rng.randrange(len(tokens)) if rng.random() < 0.3 else 0
        message = admitted(
            name,
            prompt + tokens[:num_prior],
            max_new,
            stops=stops,
            num_prior=num_prior,
            generation=rng.randrange(3),
            speculation=rng.random() < 0.9,
        )
        self.requests[name] = message
        self.expected[name] = (tokens[num_prior:], reason)
        self.streams[name] = Stream(num_prior)
        self.inbox.append(reserve(name, len(prompt) + num_prior, max_new - num_prior))

    def receive(self, out: Outgoing) -> None:
        for to, message in out:
            match message:
                case ReservationReply():
                    self.on_reply(message)
                case TokenDeltas():
                    assert to == INGRESS
                    for delta in message.deltas:
                        assert delta.generation == self.requests[delta.request_id].generation
                        self.streams[delta.request_id].take(delta)
                case CommitBatch():
                    self.on_commit(to, message)
                case CloseDraft():
                    if to.name in self.drafters:
                        self.drafters[to.name].close(message.request_ids)
                case StepReport():
                    self.on_report(message)

    def on_reply(self, reply: ReservationReply) -> None:
        if reply.request_id in self.aborted or self.streams[reply.request_id].tokens:
            return
        if reply.granted:
            self.inbox.append(self.requests[reply.request_id])
        elif self.rng.random() < 0.5:
            message = self.requests[reply.request_id]
            self.inbox.append(
                reserve(
                    reply.request_id,
                    len(message.prompt_ids),
                    message.max_new_tokens - message.num_prior_tokens,
                )
            )
        else:
            self.aborted.add(reply.request_id)

    def on_commit(self, to: Endpoint, commit: CommitBatch) -> None:
        drafter = self.drafters.get(to.name)
        if drafter is None or drafter.me != to:
            return
        batch = drafter.advance(commit)
        if batch is not None and self.rng.random() >= self.trouble:
            self.inbox.append(batch)
            if self.rng.random() < self.trouble:
                self.inbox.append(batch)
            if self.rng.random() < self.trouble:
                self.inbox.append(replace(batch, committed_lens=batch.committed_lens + 1))

    def on_report(self, report: StepReport) -> None:
        if self.rng.random() < 0.5:
            self.inbox.append(
                VerifyBudget(
                    RANK.name,
                    RANK.epoch,
                    report.step,
                    report.step + 2,
                    report.step + 2 + self.rng.randrange(6),
                    self.rng.randrange(12),
                    self.rng.random(),
                )
            )

    # --- time ---

    def deliver_some(self) -> None:
        while self.inbox and self.rng.random() < 0.8:
            late = self.rng.random() < self.trouble
            index = self.rng.randrange(len(self.inbox)) if late else 0
            message = self.inbox.pop(index)
            if not isinstance(message, ProposalBatch) and self.rng.random() < self.trouble / 2:
                self.inbox.append(message)  # once more, later
            self.receive(self.rank.on_message(message, self.now))

    def tick(self, busy: bool) -> None:
        rng = self.rng
        if busy and rng.random() < 0.4:
            self.new_request()
        if busy and rng.random() < 0.1 and self.requests:
            name = rng.choice(list(self.requests))
            self.aborted.add(name)
            self.inbox.append(AbortRequest(name, self.requests[name].generation))
        if busy and rng.random() < 0.05:
            self.change_drafters()
        self.deliver_some()
        plan = self.rank.plan_step(self.now)
        if plan is None:
            self.now += 0.01
            return
        result = self.target.step(plan)
        self.now += rng.choice([0.001, 0.02])
        self.deliver_some()
        self.receive(self.rank.apply(plan, result, self.now, 0.01))
        assert self.rank.book.pool.check_integrity() == []


def check_streams(world: World) -> None:
    for name, stream in world.streams.items():
        tokens, reason = world.expected[name]
        if name in world.aborted and stream.reason != reason:
            assert stream.reason in ("abort", None), stream
            assert stream.tokens == tokens[: len(stream.tokens)]
        elif stream.reason == "error":
            assert stream.last is not None and "no room is left" in stream.last.error
            assert stream.tokens == []
        else:
            assert (stream.tokens, stream.reason) == (tokens, reason), name


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_every_stream_equals_the_oracle_and_everything_comes_back(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.tick(busy=True)
    for _ in range(3000):
        if world.rank.is_idle and not world.inbox:
            break
        world.tick(busy=False)
    assert world.rank.is_idle, "a request never ended"
    world.now += 100.0
    world.rank.plan_step(world.now)  # lets forgotten reservations expire
    assert world.rank.check_idle() == []
    check_streams(world)
    assert all(not drafter.contexts for drafter in world.drafters.values())
    counters = world.rank.counters
    assert (counters.acceptance.proposed >= counters.acceptance.scheduled).all()
    assert (counters.acceptance.scheduled >= counters.acceptance.accepted).all()
