"""A client that leaves, at any moment, leaves nothing behind; many clients at once lose nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.http.harness import CHAT, CHAT_PATH, TEXT
from tests.http.sse_reader import Reader


async def test_client_that_leaves_mid_stream_frees_the_rank(launch):
    async with launch(text=TEXT * 4) as server:
        rank = server.ranks[0]
        rank.step_s, rank.tokens_a_step = 0.02, 1
        await Reader().read(server, until_chars=5)
        await server.until(lambda: rank.aborted, 1.0)
        assert (rank.aborted[0].request_id, rank.aborted[0].generation) == (
            rank.admitted[0].request_id,
            0,
        )
        await server.until(lambda: server.dispatcher.num_streams == 0, 1.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_before_the_first_token_frees_the_rank(launch, stream):
    async with launch() as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 0
        with pytest.raises(httpx.ReadTimeout):
            async with server.client.stream(
                "POST", CHAT_PATH, json={**CHAT, "stream": stream}, timeout=0.3
            ) as response:
                await response.aread()
        await server.until(lambda: rank.aborted, 1.0)
        await server.until(lambda: server.dispatcher.num_streams == 0, 1.0)


async def test_client_that_leaves_while_a_reservation_is_pending_undoes_it(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.answers_reservations = False
        with pytest.raises(httpx.ReadTimeout):
            await server.client.post(CHAT_PATH, json=CHAT, timeout=0.3)
        await server.until(lambda: rank.aborted, 1.0)
        assert rank.aborted[0].request_id == rank.reserves[0].request_id
        assert server.dispatcher.num_streams == 0
        assert server.front.metrics.num_disconnected == 1


async def test_many_clients_that_leave_at_any_moment_leave_nothing_behind(launch):
    async with launch(text=TEXT * 3, num_ranks=2) as server:
        for rank in server.ranks:
            rank.step_s, rank.tokens_a_step = 0.005, 1

        async def leave(delay_s: float, stream: bool) -> None:
            request = asyncio.create_task(
                server.client.post(CHAT_PATH, json={**CHAT, "stream": stream})
            )
            await asyncio.sleep(delay_s)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        await asyncio.gather(*(leave(0.004 * i, i % 2 == 0) for i in range(50)))
        await server.until(lambda: server.dispatcher.num_streams == 0, 3.0)
        for rank in server.ranks:
            await server.until(lambda rank=rank: not rank._running, 3.0)
            for request in rank.admitted:
                assert any(a.request_id == request.request_id for a in rank.aborted)
            rank.step_s = 0.0
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 200


async def test_32_concurrent_streams_lose_no_token(launch):
    async with launch(num_ranks=2) as server:
        for rank in server.ranks:
            rank.step_s, rank.tokens_a_step = 0.002, 2
        readers = await asyncio.gather(*(Reader().read(server) for _ in range(32)))
        assert all(reader.is_whole for reader in readers)
        assert all(
            reader.usage["completion_tokens"] == len(server.ranks[0].script) for reader in readers
        )
        assert all(len(rank.admitted) >= 12 for rank in server.ranks)
        assert server.dispatcher.counters.num_replayed == 0
