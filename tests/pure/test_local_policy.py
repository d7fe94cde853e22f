"""What a rank decides by itself: each policy by its name, and without the allocator the same budget as with it."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.local_policy import LocalPolicy
from actors.core.messages import Endpoint, RankProfile
from actors.core.prefix_scheduler import allocate, search
from actors.core.sps import CostCurve
from actors.core.verify_decision import VerifyDecider

GAMMA = 4
TOKENS = np.array([1, 8, 9, 16, 17, 64], np.int32)
TIMES = np.array([1.0, 1.0, 1.4, 1.4, 1.8, 7.4])
CURVE = CostCurve.of(
    RankProfile(
        Endpoint("rank-0", "target", "", "", "a"),
        "here",
        TOKENS,
        TOKENS,
        TIMES,
        0.05 * np.ones(6),
        GAMMA,
    )
)


def test_a_rank_without_the_allocator_decides_the_same_budget_by_itself() -> None:
    policy = LocalPolicy("lagged")
    policy.times.measured(CURVE)
    decider = VerifyDecider("rank-0", "a", policy, allocate)
    survival = np.cumprod(np.full((3, GAMMA), 0.9, np.float32), axis=1)
    caps = np.full(3, GAMMA, np.int32)
    rules = []
    for step in range(4):
        decision = decider.decide(step, ("x", "y", "z"), survival, caps, caps > 0, 99, 0, 0)
        rules.append(decision.choice.rule)
    assert rules == ["cold", "cold", "local_lagged", "local_lagged"]
    expected = search(survival, CURVE)
    assert decision.choice.max_draft_tokens == expected.max_draft_tokens
    assert decision.choice.min_survival == expected.min_survival


@pytest.mark.parametrize(
    ("policy", "lens"),
    [
        (LocalPolicy("none"), [0, 0, 0]),
        (LocalPolicy("static_length", static_length=2), [2, 2, 0]),
        (LocalPolicy("static_threshold", static_threshold=0.6), [4, 1, 0]),
        (LocalPolicy("algorithm1"), [4, 0, 0]),
    ],
)
def test_each_policy_decides_by_its_name(policy: LocalPolicy, lens: list[int]) -> None:
    policy.times.measured(CURVE)
    survival = np.array([[0.9, 0.8, 0.7, 0.65], [0.6, 0.1, 0.1, 0.0], [0, 0, 0, 0]], np.float32)
    if policy.name == "algorithm1":
        survival[1] = 0.0
    caps = np.array([4, 4, 0], np.int32)
    decider = VerifyDecider("rank-0", "a", policy, allocate)
    decision = decider.decide(5, ("x", "y", "z"), survival, caps, caps > 0, 99, 0, 0)
    assert decision.verify_len.tolist() == lens
    assert decision.choice.rule == policy.name
