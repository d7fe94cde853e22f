"""The policy changes while the cluster serves: what may change, and that nothing outlives its policy (C3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.core.budget_solver import EachAlone
from actors.core.capacity import Allocator
from actors.core.draft_pause import NeverDraft
from actors.core.local_policy import LocalPolicy
from actors.core.messages import Endpoint, RankProfile, StepReport, VerifyBudget
from actors.core.sps import RankTimes
from configs.change import AT_RUN_TIME, FixedSettingError, policy_change
from configs.load import describe, load
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER, RANK, oracle

PROMPT = [3, 1, 4, 1, 5]
GAMMA = 3


def budget(number: int, tokens: int) -> VerifyBudget:
    return VerifyBudget(
        RANK.name, RANK.epoch, -9, 0, 10**6, tokens, 0.0, "lagged", policy_number=number
    )


def test_a_budget_of_the_last_policy_is_never_applied_whenever_it_comes() -> None:
    session = Session(make_rank(LocalPolicy("static_length", 1)), error=0.0)
    rank = session.rank
    session.submit(admitted("a", PROMPT, 60))
    session.step()
    rank.on_message(budget(0, 3), session.now)
    plan = session.step()
    assert plan is not None and plan.verify_len.tolist() == [3]
    rank.decider.adopt(7, LocalPolicy("static_length", 2), None)
    plan = session.step()
    assert plan is not None and plan.verify_len.tolist() == [2], "what lay on the shelf is void"
    rank.on_message(budget(0, 3), session.now)  # it was under way
    plan = session.step()
    assert plan is not None and plan.verify_len.tolist() == [2]
    assert rank.decider.budgets.num_refused == 1
    rank.on_message(budget(7, 0), session.now)
    plan = session.step()
    assert plan is not None and plan.verify_len.tolist() == [0]
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 60)[0]


def test_changes_in_mid_stream_change_no_token() -> None:
    session = Session(make_rank(LocalPolicy("lagged")), error=0.3)
    rank, names = (
        session.rank,
        ("none", "static_length", "algorithm1", "static_threshold", "lagged"),
    )
    for name in "abc":
        session.submit(admitted(name, [*PROMPT, ord(name) % 7], 60))
    number = 0
    while session.step() is not None:
        number += 1
        policy = LocalPolicy(names[number % len(names)], 2, 0.3)  # type: ignore[arg-type]
        rank.decider.adopt(number, policy, policy.drafting)
        if policy.name == "none":  # as the shell does, the rank takes its leave
            session.drafter.close(tuple(rank.book.live))
        rank.set_drafters([] if policy.name == "none" else [DRAFTER])
    assert rank.is_idle and number > len(names) and rank.check_idle() == []
    for name in "abc":
        assert session.streams[name].tokens == oracle([*PROMPT, ord(name) % 7], 60)[0]


def test_the_next_policy_keeps_what_was_measured_and_brings_its_own_drafting() -> None:
    times = RankTimes()
    policy = LocalPolicy("none", times=times)
    assert policy.times is times and isinstance(policy.drafting, NeverDraft)
    rank = make_rank(LocalPolicy("lagged"))
    rank.decider.adopt(1, policy, policy.drafting)
    assert rank.decider.policy is policy and rank.decider.drafting is policy.drafting


RANK_AT = Endpoint("target-0", "target", "", "", "e")


def report(step: int) -> StepReport:
    none = np.zeros(GAMMA, np.int64)
    rows = np.full((2, GAMMA), 0.9, np.float32)
    counts = none, none, none, 2, 9, 10, 0
    return StepReport(RANK_AT, step, 0.01, 0.0, 2, 0, 4, 20, rows, *counts, "cold", 0)


def test_the_allocator_plans_under_the_policy_it_adopted() -> None:
    brain, sizes = Allocator(), np.array([1, 8, 64], np.int32)
    times = np.array([0.01, 0.012, 0.03])
    brain.fold(RankProfile(RANK_AT, "here", sizes, sizes, times, np.full(3, 0.004), GAMMA), 0.0)
    brain.fold(report(1), 0.0)
    (first,) = brain.budgets(0.0)
    assert (first.policy_number, first.expires_step - first.for_step) == (0, 8)
    brain.adopt(4, "static_length", 8, 0.0, EachAlone())
    brain.fold(report(2), 0.0)
    assert brain.budgets(0.0) == []
    brain.adopt(5, "lagged", 3, 0.0, EachAlone())
    (later,) = brain.budgets(0.0)  # the curve and the report have stayed
    assert (later.policy_number, later.based_on_step) == (5, 2)
    assert later.expires_step - later.for_step == 3
    assert replace(later, policy_number=0, expires_step=0).rule == first.rule


def test_only_the_policy_changes_at_run_time() -> None:
    running = load("laptop-cpu")
    names = {name for name, _, _ in describe(running)}
    assert names > AT_RUN_TIME
    wanted = load("laptop-cpu", ["policy.name=static_length", "policy.static_length=2"])
    assert policy_change(running, wanted) == wanted.policy
    assert policy_change(running, running) == running.policy
    for setting in ("drafter.gamma=3", "model.drafter=null", "policy.explain_rounds=8"):
        with pytest.raises(FixedSettingError, match=setting.split("=")[0]):
            policy_change(running, load("laptop-cpu", [setting]))


def test_every_fixed_difference_is_named_at_once() -> None:
    wanted = ClusterConfig.model_validate({"drafter": {"gamma": 2}, "ingress": {"port": 9}})
    with pytest.raises(FixedSettingError) as refused:
        policy_change(ClusterConfig(), wanted)
    assert "drafter.gamma (5 → 2), ingress.port (8000 → 9)" in str(refused.value)
