"""Half of many streams are left at random moments: the others notice nothing, and all memory comes back."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.http.engine_rank import GAMMA, EngineRank, replace_ranks, tiny_model
from tests.http.harness import Server, launched
from tests.torch_cpu.rank_engines import real_drafter

NUM_STREAMS, NUM_TOKENS = 500, 24
PROMPTS = [f"Prompt number {i}, which goes on for {'a while ' * (i % 4)}" for i in range(12)]
LAWS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 5}]
PHASES = {"waiting", "prefilling", "running"}


def body(index: int) -> dict[str, Any]:
    """Even ones share prompts, whose answers are known; those of the others are long and known to nobody."""
    kind = index // 2 % len(PROMPTS)
    prompt = f"{index}: {'on and on, ' * 7}" if index % 2 else PROMPTS[kind]
    law = LAWS[kind % len(LAWS)]
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **law}


class Client:
    """Reads one stream, to its end or to where it leaves: after so many pieces of text."""

    def __init__(self, index: int, leaves_after: int | None = None) -> None:
        self.index, self.leaves_after = index, leaves_after
        self.text, self.done, self.num_pieces = "", False, 0

    async def read(self, http: httpx.AsyncClient) -> None:
        """Ask again as long as there is no room for the prompt, as a client does."""
        while not await self._is_read(http):
            await asyncio.sleep(0.2)

    async def _is_read(self, http: httpx.AsyncClient) -> bool:
        async with http.stream("POST", "/v1/completions", json=body(self.index)) as response:
            if response.status_code == 429 and "KV blocks needed" in str(await response.aread()):
                assert int(response.headers["retry-after"]) > 0
                return False
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.done = True
                elif data and not line.startswith(":"):  # not a comment while it waits
                    self.text += json.loads(data)["choices"][0]["text"]
                    self.num_pieces += 1
                if self.leaves_after is not None and self.num_pieces >= self.leaves_after:
                    break
        return True


async def storm(http: httpx.AsyncClient, clients: list[Client], rng: random.Random) -> None:
    """Every other client leaves: some at a moment of their own, some after a certain piece."""
    readings = [asyncio.create_task(client.read(http)) for client in clients]

    async def leave(reading: asyncio.Task[None], after_s: float) -> None:
        await asyncio.sleep(after_s)
        reading.cancel()

    hasty = [i for i, c in enumerate(clients) if i % 2 and c.leaves_after is None]
    await asyncio.gather(*(leave(readings[i], rng.expovariate(1.0)) for i in hasty))
    results = await asyncio.gather(*readings, return_exceptions=True)
    problems = [r for r in results if isinstance(r, Exception)]
    assert not problems, problems[:3]


def make_clients(rng: random.Random) -> list[Client]:
    """Odd ones leave; half of them when they have seen some, or nearly all, of their answer."""
    return [
        Client(i, rng.randint(1, NUM_TOKENS) if i % 4 == 1 else None) for i in range(NUM_STREAMS)
    ]


async def answers_alone(server: Server) -> list[str]:
    texts = []
    for index in range(len(PROMPTS)):
        client = Client(2 * index)
        await client.read(server.client)
        texts.append(client.text)
    return texts


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_storm_of_cancelled_streams_returns_kv_and_draft_state_to_baseline(tmp_path):
    engine, codec = tiny_model(tmp_path)
    async with launched(codec, request_timeout_s=150.0) as server:
        link, drafter = server.hub.open("engine-0", "target"), real_drafter(GAMMA)
        rank = EngineRank(link, engine, drafter, max_waiting=NUM_STREAMS)
        await replace_ranks(server, rank)
        alone = await answers_alone(server)
        assert len(set(alone)) == len(alone)
        await server.until(lambda: rank.is_clean)
        loop, rng = asyncio.get_running_loop(), random.Random(3)
        num_tasks = len(asyncio.all_tasks(loop))
        # A connection is not used twice: the server may close an idle one in the very moment in which it is.
        limits = httpx.Limits(max_connections=NUM_STREAMS, max_keepalive_connections=0)
        clients = make_clients(rng)
        async with httpx.AsyncClient(base_url=server.url, timeout=150, limits=limits) as http:
            await storm(http, clients, rng)
        for client in clients[::2]:
            assert client.done and client.text == alone[client.index // 2 % len(PROMPTS)]
        left = [client for client in clients[1::2] if not client.done]
        assert len(left) > NUM_STREAMS / 4  # the rest had their whole answer before they left
        await server.until(lambda: rank.is_clean and not server.dispatcher.num_streams, 20.0)
        await server.until(lambda: len(asyncio.all_tasks(loop)) <= num_tasks)
        assert set(rank.phases_at_abort) >= PHASES, rank.phases_at_abort
        assert await answers_alone(server) == alone
