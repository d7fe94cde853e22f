"""Shells without Ray: what they do when an engine fails, and how control calls reach the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.core.layout import StepPlan, StepResult
from actors.core.messages import AdmittedRequest, CommitBatch, Endpoint, Reserve, TokenDeltas
from actors.core.sampling import SamplingParams
from actors.drafter import DrafterActor
from actors.link import Membership, ZmqLink
from actors.peers import Description, DrafterFacts, Peers, Seat
from actors.shell import Shell
from actors.target import TargetActor
from configs.schema import ClusterConfig
from tests import ray_fakes
from tests.link_behaviour import commit_batch, receive

MEMBERSHIP = Membership.create()
CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32", "max_model_len": 512},
        "target": {"kv_cache_tokens": 4096, "max_batch_tokens": 64},
    }
)


class Failures(list[tuple[bool, str]]):
    def __call__(self, was_ready: bool, cause: str) -> None:
        self.append((was_ready, cause))


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def start(failures: Failures) -> Iterator[Callable[..., Any]]:
    started: list[Shell] = []

    def start_one(cls: type[Shell], name: str, *arguments: Any) -> Shell:
        seat = Seat(name, MEMBERSHIP, "127.0.0.1")
        shell: Any = cls(seat, CONFIG, *arguments, on_failure=failures)  # type: ignore[call-arg]
        started.append(shell)
        return shell

    yield start_one
    for shell in started:
        asyncio.run(shell.stop())


def describe(shell: Shell) -> Description:
    return asyncio.run(shell.describe())


def until(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def until_ready(shell: Shell) -> Description:
    until(lambda: describe(shell).phase == "ready")
    return describe(shell)


def target_that_fails_in(*steps: int) -> Any:
    class Target(ray_fakes.FakeTarget):
        def step(self, plan: StepPlan) -> StepResult:
            if plan.step in steps:
                raise RuntimeError("the device is on fire")
            return super().step(plan)

    return Target


@pytest.fixture
def client() -> Iterator[ZmqLink]:
    link = ZmqLink("client", "ingress", MEMBERSHIP, "127.0.0.1")
    yield link
    link.close()


def submit(client: ZmqLink, rank: Endpoint, request_id: str, num_tokens: int = 5) -> None:
    prompt = np.array([5, 6, 7], np.int32)
    client.send(rank, Reserve(request_id, client.endpoint, 3, num_tokens))
    receive(client, 1)
    params = SamplingParams(temperature=0.0)
    client.send(
        rank, AdmittedRequest(request_id, 0, client.endpoint, prompt, 0, num_tokens, params)
    )


def end_of(client: ZmqLink, request_id: str) -> Any:
    def find() -> Any:
        for message in client.poll(0.05):
            assert isinstance(message, TokenDeltas)
            for delta in message.deltas:
                if delta.request_id == request_id and delta.finish_reason:
                    return delta
        return None

    return until(find)


def start_target(start: Callable[..., Any], engine: Any = ray_fakes.FakeTarget) -> Any:
    return start(TargetActor, "target-0", engine, ray_fakes.fake_step_times)


# --- failing ----------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_and_nothing_else(
    start: Any, client: ZmqLink, failures: Failures
) -> None:
    shell = start_target(start, target_that_fails_in(1))
    rank = until_ready(shell).endpoint
    submit(client, rank, "unlucky")
    last = end_of(client, "unlucky")
    assert last.finish_reason == "error" and "on fire" in last.error
    submit(client, rank, "lucky")
    assert end_of(client, "lucky").finish_reason == "length"
    stats = asyncio.run(shell.stats())
    assert stats["num_engine_failures"] == stats["num_failed"] == 1
    assert failures == []


def test_an_engine_that_only_fails_ends_the_process_with_its_cause(
    start: Any, client: ZmqLink, failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    shell = start_target(start, target_that_fails_in(*range(1, 10)))
    rank = until_ready(shell).endpoint
    for i in range(3):
        submit(client, rank, f"r{i}")
        assert end_of(client, f"r{i}").finish_reason == "error"
    until(lambda: failures)
    assert failures == [(True, "RuntimeError: the device is on fire")]
    assert describe(shell).phase == "failed"
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    assert "target-0 failed while ready: RuntimeError: the device is on fire" in record.getMessage()
    assert "Traceback" in record.getMessage()


def test_an_engine_that_does_not_load_is_described_before_the_process_ends(
    start: Any, failures: Failures
) -> None:
    def load(config: Any, seat: Any) -> Any:
        raise FileNotFoundError("no weights")

    shell = start_target(start, load)
    until(lambda: failures)
    assert failures == [(False, "FileNotFoundError: no weights")]
    description = describe(shell)
    assert (description.phase, description.detail) == ("failed", "FileNotFoundError: no weights")


def test_rows_that_depend_on_their_batch_are_reported_loudly(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Variant(ray_fakes.FakeTarget):
        def check_row_invariance(self) -> bool:
            return False

    shell = start_target(start, Variant)
    until_ready(shell)
    assert asyncio.run(shell.stats())["is_row_invariant"] is False
    assert "may give other tokens" in describe(shell).warning
    assert "numerics=reproducible" in caplog.text


def test_a_control_call_that_fails_reaches_its_caller_and_not_the_loop(
    start: Any, failures: Failures
) -> None:
    until_ready(shell := start_target(start))

    def fail() -> None:
        raise ValueError("bad question")

    with pytest.raises(ValueError, match="bad question"):
        asyncio.run(shell.on_loop(fail))
    assert failures == []


def test_stopping_ends_the_thread_and_closes_the_link(start: Any, client: ZmqLink) -> None:
    until_ready(shell := start_target(start))
    asyncio.run(shell.stop())
    assert describe(shell).phase == "stopped"
    assert "target-0-loop" not in [thread.name for thread in threading.enumerate()]


# --- peers ------------------------------------------------------------------------------------------------------------


def facts(name: str, gamma: int) -> DrafterFacts:
    spec = replace(ray_fakes.FakeDrafter(CONFIG, Seat(name, MEMBERSHIP)).spec, gamma=gamma)
    endpoint = Endpoint(name, "drafter", "tcp://127.0.0.1:9", MEMBERSHIP.public_key, "e")
    return DrafterFacts(endpoint, spec, ((1, 0.25), (16, 0.5)))


def test_an_older_table_is_ignored(start: Any) -> None:
    until_ready(shell := start_target(start))
    asyncio.run(shell.connect(Peers(version=5, drafters=(facts("drafter-0", 5),))))
    asyncio.run(shell.connect(Peers(version=4)))
    assert describe(shell).peers_version == 5
    assert len(shell.peers.drafters) == 1


def test_the_draft_times_of_a_drafter_complete_the_cost_curve(start: Any) -> None:
    until_ready(shell := start_target(start))
    assert not asyncio.run(shell.profile()).draft_time_s.any()
    asyncio.run(shell.connect(Peers(version=1, drafters=(facts("drafter-0", 5),))))
    profile = asyncio.run(shell.profile())
    assert profile.draft_time_s[0] == 0.25
    assert profile.draft_time_s[-1] == 0.5


def test_a_drafter_with_blocks_of_another_length_is_not_used(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    until_ready(shell := start_target(start))
    asyncio.run(shell.connect(Peers(version=1, drafters=(facts("drafter-0", 7),))))
    assert "drafter-0 is not used by target-0: it offers blocks of gamma=7, not 5" in caplog.text


# --- the drafter ------------------------------------------------------------------------------------------------------


def commit(rank: Endpoint, request_id: str) -> CommitBatch:
    batch = commit_batch(rank, 0, 1)
    features = np.stack([np.arange(8), np.ones(8)], 1).astype(np.float32)
    return replace(
        batch,
        request_ids=(request_id,),
        first_positions=np.zeros(1, np.int32),
        cu_feature_len=np.array([0, 8], np.int32),
        features=features,
    )


def test_a_draft_that_fails_costs_its_blocks_and_the_third_in_a_row_the_process(
    start: Any, client: ZmqLink, failures: Failures
) -> None:
    class Failing(ray_fakes.FakeDrafter):
        def advance(self, batch: CommitBatch) -> Any:
            proposals = super().advance(batch)
            if batch.request_ids[0].startswith("bad"):
                raise RuntimeError("cannot draft")
            return proposals

    shell = start(DrafterActor, "drafter-0", Failing)
    endpoint = until_ready(shell).endpoint
    rank = replace(client.endpoint, role="target")
    answered: list[Any] = []

    def num_batches() -> int:
        answered.extend(client.poll(0.02))
        return int(asyncio.run(shell.stats())["num_batches"])

    for i, request_id in enumerate(("bad-0", "bad-1", "good", "bad-2", "bad-3")):
        client.send(endpoint, commit(rank, request_id))
        until(lambda i=i: num_batches() == i + 1)
    assert [message.request_ids for message in answered] == [("good",)]
    stats = asyncio.run(shell.stats())
    assert (stats["num_failed"], stats["open_requests"]) == (4, 1)
    assert failures == []
    client.send(endpoint, commit(rank, "bad-4"))
    until(lambda: client.poll(0) or failures)
    assert failures == [(True, "RuntimeError: cannot draft")]


def test_contexts_of_a_rank_that_has_restarted_are_closed(start: Any, client: ZmqLink) -> None:
    shell = start(DrafterActor, "drafter-0", ray_fakes.FakeDrafter)
    endpoint = until_ready(shell).endpoint
    rank = replace(client.endpoint, role="target")
    reborn = replace(rank, epoch="later")
    asyncio.run(shell.connect(Peers(version=1, ranks=(rank,))))
    client.send(endpoint, commit(rank, "old"))
    receive(client, 1)
    asyncio.run(shell.connect(Peers(version=2, ranks=(reborn,))))
    assert asyncio.run(shell.stats())["open_requests"] == 0


def test_draft_times_are_measured_before_the_drafter_is_ready(start: Any) -> None:
    description = until_ready(start(DrafterActor, "drafter-0", ray_fakes.FakeDrafter))
    assert [size for size, _ in description.draft_times] == [1, 4, 16]
    assert all(seconds >= ray_fakes.DRAFT_S for _, seconds in description.draft_times)
    assert description.spec is not None
