"""What every policy does at the edges: cold, joining and leaving requests, prefill in the step, the end of a stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from actors.core.budget_solver import EachAlone
from actors.core.capacity import Allocator
from actors.core.local_policy import LocalPolicy
from actors.core.lockstep_solver import JointSolver
from actors.core.messages import RankProfile
from actors.core.sps import CostCurve
from actors.core.verify_decision import StepFacts
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import RANK, oracle

GAMMA = 3
TOKENS = np.array([1, 4, 8, 12, 16, 24, 32], np.int32)
SECONDS = np.array([1.0, 1.05, 1.1, 1.5, 1.55, 2.4, 3.2])
PROFILE = RankProfile(RANK, "", TOKENS, TOKENS, SECONDS, np.zeros(len(TOKENS)), GAMMA)
LOCAL = ["none", "static_length", "static_threshold", "algorithm1", "lagged", "joint"]
SOLVERS: dict[str, Callable[[], object]] = {
    "lagged, by the allocator": EachAlone,
    "joint, by the allocator": lambda: JointSolver([[RANK.name]]),
}


def local(name: str, is_measured: bool = True) -> LocalPolicy:
    policy = LocalPolicy(name, static_length=2, static_threshold=0.3)  # type: ignore[arg-type]
    if is_measured:
        policy.times.measured(CostCurve.of(PROFILE))
    return policy


class Served(Session):
    """A session with the allocator beside it, where the policy is one of its own."""

    def __init__(self, name: str, **limits: object) -> None:
        super().__init__(make_rank(local(name.split(",")[0]), **limits), error=0.3)
        self.allocator = None
        if name in SOLVERS:
            self.allocator = Allocator(solver=SOLVERS[name]())  # type: ignore[arg-type]
            self.allocator.fold(PROFILE, 0.0)

    def step(self, drafts: bool = True):  # type: ignore[no-untyped-def]
        left = {name: request.num_remaining for name, request in self.rank.book.live.items()}
        plan = super().step(drafts)
        if plan is None:
            return None
        for row, name in enumerate(plan.request_ids):
            assert plan.verify_len[row] < left[name], "verified past the last token of the stream"
        if self.allocator is not None:
            assert self.rank.report is not None
            self.allocator.fold(self.rank.report, self.now)
            for budget in self.allocator.budgets(self.now):
                self.rank.on_message(budget, self.now)
        return plan


EVERY = [*LOCAL, *SOLVERS]


@pytest.mark.parametrize("name", EVERY)
def test_no_stream_is_verified_past_its_last_token(name: str) -> None:
    session = Served(name)
    prompts = {str(length): [length, 7] for length in range(1, 8)}
    for length, prompt in prompts.items():
        session.submit(admitted(length, prompt, int(length)))
    session.run()
    for length, prompt in prompts.items():
        assert session.streams[length].tokens == oracle(prompt, int(length))[0]
    assert session.rank.check_idle() == []


@pytest.mark.parametrize("name", EVERY)
def test_requests_join_and_leave_in_every_step(name: str) -> None:
    session = Served(name)
    for i in range(16):
        session.submit(admitted(str(i), [i + 1, i], 5 + 3 * (i % 4)))
        session.step()
    session.run()
    for i in range(16):
        assert session.streams[str(i)].tokens == oracle([i + 1, i], 5 + 3 * (i % 4))[0]
    sizes = {len(decision.request_ids) for decision in session.decisions}
    assert len(sizes) > 3
    verified = sum(int(decision.verify_len.sum()) for decision in session.decisions)
    assert (verified == 0) == (name == "none")


@pytest.mark.parametrize("name", EVERY)
def test_a_prompt_in_the_step_leaves_every_stream_its_round_and_the_step_its_size(
    name: str,
) -> None:
    session = Served(name, max_batch_tokens=16)
    for i in range(4):
        session.submit(admitted(f"r{i}", [i + 1], 40))
    for _ in range(4):
        session.step()
    prompt = [n % 31 for n in range(60)]
    session.submit(admitted("long", prompt, 6))
    num_mixed = 0
    while session.rank.book.prefilling or session.rank.book.waiting:
        plan = session.step()
        if plan is not None and "long" in plan.request_ids and len(plan.request_ids) > 1:
            num_mixed += 1
            assert plan.batch_tokens <= 16
    assert num_mixed > 2
    session.run()
    assert session.streams["long"].tokens == oracle(prompt, 6)[0]
    assert all(session.streams[f"r{i}"].tokens == oracle([i + 1], 40)[0] for i in range(4))


@pytest.mark.parametrize(
    ("name", "rule"),
    [("static_length", "static_length"), ("static_threshold", "static_threshold"),
     ("algorithm1", "algorithm1"), ("lagged", "cold"), ("joint", "cold"),
     ("lagged, by the allocator", "cold"), ("joint, by the allocator", "cold")],
)  # fmt: skip
def test_the_first_rounds_of_a_rank_are_decided_without_looking_ahead(name: str, rule: str) -> None:
    session = Served(name)
    session.submit(admitted("a", [3, 1, 4], 40))
    session.run()
    first = next(decision for decision in session.decisions if decision.has_draft.any())
    assert first.choice.rule == rule
    if rule == "cold":
        assert first.choice.min_survival == 0.5  # more likely accepted than not


@pytest.mark.parametrize("name", ["algorithm1", "lagged", "joint"])
def test_prefill_tokens_move_the_decision_along_the_curve(name: str) -> None:
    survivals = np.full((4, GAMMA), 0.3, np.float32)
    caps = np.full(4, GAMMA, np.int32)
    most = [
        local(name).choose(StepFacts(9, survivals, caps, 7, survivals, prefill, 0)).max_draft_tokens
        for prefill in (0, 4)
    ]
    # Alone, four tokens more fill a tread; beside four prompt tokens they begin the next one.
    assert most[0] != most[1]


@pytest.mark.parametrize("name", ["algorithm1", "lagged", "joint"])
def test_a_rank_that_was_never_measured_verifies_what_is_likely_and_says_cold(name: str) -> None:
    survivals = np.array([[0.9, 0.6, 0.2]], np.float32)
    facts = StepFacts(9, survivals, np.full(1, GAMMA, np.int32), 7, survivals, 0, 0)
    choice = local(name, is_measured=False).choose(facts)
    assert choice.rule.removeprefix("local_") == "cold" and choice.min_survival == 0.5
