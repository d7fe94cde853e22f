"""The closed loop of `dspark bench` against our own endpoint with a real engine, while the rank's policy changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.core.local_policy import LocalPolicy
from cluster.frontier.drive import Server
from cluster.frontier.rates import StreamSample, rates_of
from cluster.frontier.workload import Request
from tests.http.engine_rank import EngineRank, replace_ranks, tiny_model
from tests.http.harness import launched

REQUESTS = [Request("chat", f"Hi {n}", 12 + 5 * (n % 3), seed=n) for n in range(9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return tiny_model(tmp_path_factory.mktemp("tiny-llama"))


async def test_texts_are_equal_over_policies_and_concurrencies_and_counts_follow_the_policy(
    model: Any,
) -> None:
    tiny_engine, codec = model
    async with launched(codec) as front:
        rank = EngineRank(front.hub.open("engine-0", "target"), tiny_engine)
        await replace_ranks(front, rank)
        server = Server(f"{front.url}/v1/completions")

        async def serve(concurrency: int) -> list[StreamSample]:
            return await asyncio.to_thread(server.serve, REQUESTS, concurrency, 1.0)

        verified = await serve(3)
        plain = LocalPolicy("none")
        rank.rank.decider.adopt(1, plain, plain.drafting)
        unverified = await serve(1)
        length = LocalPolicy("static_length", 1)
        rank.rank.decider.adopt(2, length, None)
        one = await serve(2)
    runs = verified, unverified, one
    assert not [sample.error for run in runs for sample in run if sample.error]
    digests = [[sample.digest for sample in run] for run in runs]
    assert digests[0] == digests[1] == digests[2]
    assert sum(s.completion_tokens for s in verified) > len(REQUESTS)
    assert all(sample.num_scheduled == 0 for sample in unverified)
    assert sum(sample.num_accepted for sample in verified) > 0
    assert all(0 < s.num_scheduled <= s.num_rounds for s in one if s.completion_tokens > 2)
    # One stream at a time is busy from its first token on; the rates are those of what was served.
    rates = rates_of(unverified, 1, num_nodes=1)
    assert rates["acceptance_length"] == 1.0 and rates["scheduled_per_round"] == 0.0
    assert rates["node_tokens_per_s"] > 0 and rates["num_errors"] == 0
