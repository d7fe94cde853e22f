"""The target's shell and its drafters, without Ray."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from actors import timing
from actors.core.messages import Endpoint
from actors.core.prefix_scheduler import NoSpeculation, allocate
from actors.core.verify_decision import DraftFacts
from actors.link import Membership
from actors.peers import DrafterFacts, Peers, Seat
from actors.target import TargetActor
from configs.change import PolicyOrder
from configs.policy import PolicyConfig
from configs.schema import ClusterConfig
from tests import ray_fakes

MEMBERSHIP = Membership.create()


def drafters_used(policy: Any, becomes: Any = None) -> list[str]:
    """By a rank that was told of one drafter, and then perhaps of another policy."""
    config = ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32", "max_model_len": 512},
            "target": {"kv_cache_tokens": 4096, "max_batch_tokens": 64},
            "policy": {"name": policy},
        }
    )
    seat = Seat("target-0", MEMBERSHIP, "127.0.0.1")
    shell: Any = TargetActor(seat, config, ray_fakes.FakeTarget, ray_fakes.fake_step_times)
    deadline = time.monotonic() + 10
    while asyncio.run(shell.describe()).phase != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    endpoint = Endpoint("drafter-0", "drafter", "tcp://127.0.0.1:9", MEMBERSHIP.public_key, "e")
    spec = ray_fakes.FakeDrafter(config, Seat("drafter-0", MEMBERSHIP)).spec
    facts = DrafterFacts(endpoint, spec, ((1, 0.25), (16, 0.5)))
    asyncio.run(shell.connect(Peers(version=1, drafters=(facts,))))
    used = list(shell._rank.book.drafts.drafters)
    if becomes:
        order = PolicyOrder(4, PolicyConfig(name=becomes))
        asyncio.run(shell.connect(Peers(version=2, drafters=(facts,), order=order)))
        # A supervisor that knows of no order, or of an older one, takes nothing back.
        older = PolicyOrder(3, PolicyConfig(name=policy))
        for version, said in ((3, None), (4, older)):
            asyncio.run(shell.connect(Peers(version=version, drafters=(facts,), order=said)))
        assert asyncio.run(shell.describe()).order == order
        assert asyncio.run(shell.stats())["policy"] == becomes
        used = list(shell._rank.book.drafts.drafters)
    asyncio.run(shell.stop())
    return used


@pytest.mark.parametrize(("policy", "used"), [("lagged", ["drafter-0"]), ("none", [])])
def test_a_rank_that_never_verifies_a_draft_asks_and_waits_for_none(
    policy: str, used: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert drafters_used(policy) == used
    assert "is not used" not in caplog.text


@pytest.mark.parametrize(
    ("policy", "becomes", "used"), [("lagged", "none", []), ("none", "lagged", ["drafter-0"])]
)
def test_a_rank_takes_leave_of_its_drafters_or_takes_them_on_with_its_policy(
    policy: str, becomes: str, used: list[str]
) -> None:
    assert drafters_used(policy, becomes) == used


def test_the_time_of_every_decision_is_counted() -> None:
    clock = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
        decider = timing.TimedDecider("rank", "e", NoSpeculation(), allocate)
        none = np.zeros((0, 3), np.float32)
        empty = np.zeros(0, np.int32)
        decision = decider.decide(4, (), none, empty, empty > 0, 0, 0, 0)
        assert decider.choose_drafting(DraftFacts(5, 2, 2, 0, 8)).asks.all()
    assert decision.step == 4
    assert decider.seconds == 2.0
