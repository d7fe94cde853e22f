"""The front against the real decisions of a rank (only the model is scripted): what one sends the other understands."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from actors.core.admission import RankLimits
from actors.core.layout import StepPlan, StepResult
from actors.core.messages import Endpoint
from actors.core.prefix_scheduler import allocate
from actors.core.rank import Rank
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import StepFacts, VerifyDecider
from actors.link import LocalLink
from tests.http.harness import CHAT, CHAT_PATH, byte_codec

CODEC = byte_codec()
LETTERS = CODEC.encode("abcdefghijklmnopqrstuvwxyz ,.é", add_special_tokens=False)
MAX_TOKENS = 40


def following(token_id: int, position: int) -> int:
    """What the scripted model says after `token_id` at `position`."""
    return LETTERS[(token_id * 7 + position * 3) % len(LETTERS)]


def expected_text(prompt: str, num_tokens: int) -> str:
    token_ids = CODEC.encode(prompt, add_special_tokens=False)
    num_prompt = len(token_ids)
    for _ in range(num_tokens):
        token_ids.append(following(token_ids[-1], len(token_ids) - 1))
    detokenizer = CODEC.detokenizer()
    return "".join(detokenizer.feed(i) for i in token_ids[num_prompt:]) + detokenizer.flush()


class Nothing:
    def choose(self, _: StepFacts) -> VerifyChoice:
        return VerifyChoice(0, 0.0, "none")


class RealRank:
    """The loop of a target rank without Ray and torch."""

    def __init__(self, link: LocalLink, **overrides: int) -> None:
        self.name, self.link = link.endpoint.name, link
        limits = {
            "num_blocks": 256,
            "block_size": 16,
            "max_model_len": 512,
            "vocab_size": CODEC.vocab_size,
            "max_running": 16,
            "max_waiting": 64,
            "max_batch_tokens": 64,
            "gamma": 0,
            "max_wait_s": 0.0,
            "reservation_ttl_s": 5.0,
        }
        decider = VerifyDecider(self.name, link.endpoint.epoch, Nothing(), allocate)
        self.rank = Rank(link.endpoint, RankLimits(**{**limits, **overrides}), decider)
        self.step_s = 0.0
        self.problems: list[str] | None = None
        self._killed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        return self.link.endpoint

    def kill(self) -> None:
        self._killed = True
        self.link.wake()
        self._thread.join()
        self.link.close()

    @property
    def is_clean(self) -> bool:
        """Idle, and every block, slot and reservation is back."""
        return self.problems == [] and self.rank.is_idle

    def _run(self) -> None:
        while not self._killed:
            for message in self.link.poll(0.01):
                self.problems = None
                self._send(self.rank.on_message(message, time.monotonic()))
            plan = self.rank.plan_step(time.monotonic())
            if plan is not None:
                time.sleep(self.step_s)
                self._send(self.rank.apply(plan, self._compute(plan), time.monotonic(), 0.001))
            elif self.rank.is_idle:
                self.problems = self.rank.check_idle()

    def _compute(self, plan: StepPlan) -> StepResult:
        last = plan.cu_query_len[1:] - 1
        next_token = [following(int(plan.token_ids[i]), int(plan.positions[i])) for i in last]
        chosen = np.where(plan.samples, next_token, -1).astype(np.int32)
        return StepResult(np.zeros(plan.num_requests, np.int32), chosen)

    def _send(self, outgoing) -> None:
        for to, message in outgoing:
            self.link.send(to, message)


@pytest.fixture
def real(launch):
    """A front whose ranks are real ones."""

    async def replace(server, num_ranks: int = 1, **overrides: int) -> list[RealRank]:
        for rank in server.ranks:
            rank.kill()
        server.ranks[:] = [
            RealRank(server.hub.open(f"real-{i}", "target"), **overrides) for i in range(num_ranks)
        ]
        server.publish()
        version = server.tables[-1].version
        await server.until(lambda: server.dispatcher.router.table.version == version)
        return server.ranks

    return replace


async def complete(server, prompt: str, **body) -> dict:
    body = {
        "model": "tiny-bytes",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        **body,
    }
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_text_lengths_and_ends_agree(launch, real):
    async with launch() as server:
        (rank,) = await real(server)
        whole = await complete(server, "hello")
        assert whole["choices"][0]["text"] == expected_text("hello", MAX_TOKENS)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == MAX_TOKENS
        # A stop token ends it, counts as a token, and is no text.
        text = expected_text("hello", MAX_TOKENS)
        stop_id = CODEC.encode(text[5], add_special_tokens=False)[0]
        stopped = await complete(server, "hello", stop_token_ids=[stop_id])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["choices"][0]["text"] == text[: text.index(text[5])]
        # So does a stop string, wherever the tokens are cut.
        stopped = await complete(server, "hello", stop=text[7:10])
        assert stopped["choices"][0]["text"] == text[: text.index(text[7:10])]
        await server.until(lambda: rank.is_clean)


async def test_40_streams_on_two_ranks_are_exact_and_leave_nothing(launch, real):
    async with launch() as server:
        ranks = await real(server, num_ranks=2, max_running=8, num_blocks=400)
        prompts = [f"prompt number {i} " + "x" * (i * 5) for i in range(40)]
        answers = await asyncio.gather(
            *(complete(server, p, max_tokens=20 + len(p) % 7) for p in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["choices"][0]["text"] == expected_text(prompt, 20 + len(prompt) % 7)
        for rank in ranks:
            await server.until(lambda rank=rank: rank.is_clean)
            assert rank.rank.counters.num_finished > 5


async def test_streams_of_a_dead_rank_end_with_the_tokens_they_would_have_had(launch, real):
    async with launch() as server:
        first, second = await real(server, num_ranks=2)
        first.step_s = second.step_s = 0.02
        prompts = [f"prompt {i}" for i in range(12)]
        running = [asyncio.create_task(complete(server, p)) for p in prompts]
        await asyncio.sleep(0.4)
        first.kill()
        server.publish(**{first.name: "dead"})
        for prompt, answer in zip(prompts, await asyncio.gather(*running), strict=True):
            assert answer["choices"][0]["text"] == expected_text(prompt, MAX_TOKENS)
            assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        assert server.dispatcher.counters.num_replayed >= 3
        await server.until(lambda: second.is_clean)


async def test_clients_that_leave_at_any_moment_give_every_block_back(launch, real):
    async with launch() as server:
        (rank,) = await real(server, max_running=4)
        rank.step_s = 0.005

        async def leave(delay_s: float, stream: bool) -> None:
            request = asyncio.create_task(
                server.client.post(CHAT_PATH, json={**CHAT, "stream": stream, "max_tokens": 60})
            )
            await asyncio.sleep(delay_s)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        await asyncio.gather(*(leave(0.01 * i, i % 2 == 0) for i in range(40)))
        await server.until(lambda: rank.is_clean)
        assert server.dispatcher.num_streams == 0


async def test_a_full_rank_refuses_with_a_time_to_come_back(launch, real):
    async with launch() as server:
        (rank,) = await real(server, max_running=1, max_waiting=1)
        rank.step_s = 0.05
        running = [asyncio.create_task(complete(server, "a")) for _ in range(2)]
        await server.until(lambda: server.dispatcher.num_streams == 2)
        await asyncio.sleep(0.1)
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert "running or waiting" in answer.json()["error"]["message"]
        rank.step_s = 0.0
        await asyncio.gather(*running)


async def test_what_the_cache_can_never_hold_is_a_400(launch, real):
    async with launch() as server:
        await real(server, num_blocks=4)
        answer = await server.client.post(
            "/v1/completions", json={"model": "tiny-bytes", "prompt": "x" * 60, "max_tokens": 30}
        )
        assert answer.status_code == 400 and "at most 64" in answer.json()["error"]["message"]


async def test_the_rounds_of_an_answer_are_explained_by_its_rank(launch, real):
    async with launch() as server:
        ranks = await real(server, num_ranks=2)
        server.said = {}

        def ask() -> None:
            for rank in ranks:
                server.said[rank.name] = rank.rank.book.explain(answer["id"])

        body = {**CHAT, "max_tokens": MAX_TOKENS, "dspark": {"explain": True}}
        answer = (await server.client.post(CHAT_PATH, json=body)).json()
        ask()
        told = (await server.client.get(f"/v1/requests/{answer['id']}/explain")).json()
        (segment,) = told["choices"][0]["segments"]
        assert segment["num_rounds"] == len(segment["rounds"]) == MAX_TOKENS - 1
        assert {each["cut_by"] for each in segment["rounds"]} == {"fallback", "length"}
        answer = (await server.client.post(CHAT_PATH, json={**body, "dspark": {}})).json()
        ask()
        refused = await server.client.get(f"/v1/requests/{answer['id']}/explain")
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "explain_off"
