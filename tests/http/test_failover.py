"""Messages may come twice, late or never, and ranks may die: the client sees a pause, never a wrong token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from actors.core.messages import Endpoint, RankRoute, RoutingTable, TokenDelta
from tests.http.harness import CHAT, CHAT_PATH, TEXT
from tests.http.sse_reader import Reader


async def test_repeated_and_overlapping_deltas_change_nothing(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 6
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: rank._running and next(iter(rank._running.values()))[1] == 6)
        request = rank.admitted[0]
        for first in (0, 3, 1, 5):
            rank.say(
                request,
                TokenDelta(request.request_id, 0, first, tuple(rank.script[first : first + 4])),
            )
        rank.say(request, TokenDelta(request.request_id, 5, 0, (1, 2, 3)))
        rank.say(request, TokenDelta("another", 0, 0, (1, 2, 3)))
        rank.num_tokens_before_pause = None
        assert (await reading).is_whole
        assert server.dispatcher.counters.num_replayed == 0
        # Nobody waits for those two: the rank is told to stop them.
        await server.until(lambda: {a.request_id for a in rank.aborted} >= {"another"})


async def test_a_lost_delta_is_replayed_without_a_gap(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.lost_indices = {6}
        assert (await Reader().read(server)).is_whole
        assert not rank.lost_indices
        assert rank.admitted[1].generation == 1 and rank.admitted[1].num_prior_tokens == 6
        assert rank.aborted[0].generation == 0


async def test_a_lost_last_delta_is_noticed_by_its_silence(launch):
    async with launch(stall_timeout_s=0.3) as server:
        rank = server.ranks[0]
        rank.lost_indices = {len(rank.script) // 3 * 3}
        assert (await Reader().read(server)).is_whole


async def test_a_lost_admission_is_sent_again(launch, monkeypatch):
    monkeypatch.setattr("cluster.live_stream.READMIT_S", 0.2)
    async with launch() as server:
        rank = server.ranks[0]
        send = server.dispatcher.link.send
        lost: list[Any] = []

        def lossy(to: Any, message: Any) -> None:
            if type(message).__name__ == "AdmittedRequest" and not lost:
                lost.append(message)
            else:
                send(to, message)

        monkeypatch.setattr(server.dispatcher.link, "send", lossy)
        assert (await Reader().read(server)).is_whole
        assert lost and rank.admitted[0].generation == 0


@pytest.mark.parametrize("state", ["dead", "gone"])
async def test_a_stream_goes_on_elsewhere_when_its_rank_dies(launch, state):
    async with launch(num_ranks=2) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 20
        reading = asyncio.create_task(Reader().read(server, seed=4))
        await server.until(lambda: any(r.admitted for r in server.ranks))
        first, second = sorted(server.ranks, key=lambda r: not r.admitted)
        await server.until(lambda: next(iter(first._running.values()))[1] == 20)
        await asyncio.sleep(0.05)
        first.kill()
        second.num_tokens_before_pause = None
        server.publish(**{first.name: state})
        reader = await reading
        assert reader.is_whole and reader.usage["completion_tokens"] == len(first.script)
        again = second.admitted[0]
        assert (again.generation, again.num_prior_tokens) == (1, 20)
        assert list(again.prompt_ids) == [*first.admitted[0].prompt_ids, *first.script[:20]]
        assert again.sampling == first.admitted[0].sampling
        # The room asked for is what is left, not the whole again.
        assert second.reserves[0].prompt_len == len(again.prompt_ids)
        assert second.reserves[0].max_new_tokens == again.max_new_tokens - 20
        # Rounds of both ranks count.
        assert reader.usage["dspark"]["num_rounds"] == 7 + -(-(len(first.script) - 20) // 3)


async def test_a_stream_leaves_a_rank_that_the_link_cannot_reach_before_the_supervisor_knows(
    launch,
):
    async with launch(num_ranks=2) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 20
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: any(r.admitted for r in server.ranks))
        first, second = sorted(server.ranks, key=lambda r: not r.admitted)
        await server.until(lambda: next(iter(first._running.values()))[1] == 20)
        second.num_tokens_before_pause = None
        first.kill()
        server.dispatcher.receive([], [first.endpoint])
        assert (await asyncio.wait_for(reading, 5)).is_whole


async def test_a_stream_goes_on_when_its_only_rank_restarts(launch):
    async with launch() as server:
        old = server.ranks[0]
        old.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: old._running and next(iter(old._running.values()))[1] == 10)
        await asyncio.sleep(0.05)
        old.kill()
        server.publish(**{"rank-0": "starting"})
        await asyncio.sleep(0.3)
        server.ranks[0] = type(old)(
            server.hub.open("rank-0", "target"), old.script
        )  # another epoch
        server.publish()
        assert (await reading).is_whole
        assert server.ranks[0].admitted[0].num_prior_tokens == 10


async def test_a_supervisor_that_has_just_restarted_and_knows_nobody_yet_disturbs_no_stream(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: rank._running and next(iter(rank._running.values()))[1] == 10)
        unheard = Endpoint(rank.name, "target", "", "", "")
        version = server.tables[-1].version + 1
        server.tables.append(RoutingTable(version, (RankRoute(unheard, "starting", "not heard"),)))
        await server.until(lambda: server.dispatcher.router.table.version == version)
        await asyncio.sleep(0.3)
        server.publish()
        rank.num_tokens_before_pause = None
        assert (await reading).is_whole
        assert len(rank.admitted) == 1 and not rank.aborted


async def test_a_rank_that_once_missed_a_reservation_can_still_take_the_stream(launch):
    async with launch(num_ranks=2, reservation_timeout_s=0.2) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: any(r.admitted for r in server.ranks))
        first, second = sorted(server.ranks, key=lambda r: not r.admitted)
        second.answers_reservations, second.num_tokens_before_pause = False, None
        first.kill()
        server.publish(**{first.name: "dead"})
        await server.until(lambda: second.aborted)
        second.answers_reservations = True
        assert (await reading).is_whole


async def test_a_silent_rank_is_given_up_after_the_bound(launch):
    async with launch(num_ranks=2, stall_timeout_s=0.3) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 20
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: any(r.admitted for r in server.ranks))
        first, second = sorted(server.ranks, key=lambda r: not r.admitted)
        second.num_tokens_before_pause = None
        assert (await reading).is_whole
        await server.until(lambda: first.aborted)


async def test_a_rank_that_gives_requests_up_is_left(launch):
    async with launch(num_ranks=2) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 9
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: any(r._running for r in server.ranks))
        first, second = sorted(server.ranks, key=lambda r: not r.admitted)
        await server.until(lambda: next(iter(first._running.values()))[1] == 9)
        second.num_tokens_before_pause = None
        server.publish(**{first.name: "draining"})
        await server.until(lambda: server.dispatcher.router.table.version == 2)
        request = first.admitted[0]
        first._running.clear()
        first.say(request, TokenDelta(request.request_id, 0, 9, (), "abort"))
        assert (await reading).is_whole
        assert not first.aborted  # it had ended the request itself


async def test_a_stream_that_cannot_go_on_ends_with_an_error_event(launch):
    async with launch(replay_timeout_s=0.5) as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        whole = asyncio.create_task(server.client.post(CHAT_PATH, json=CHAT))
        await server.until(lambda: len(rank._running) == 2)
        await asyncio.sleep(0.1)
        rank.kill()
        server.publish(**{"rank-0": "dead"})
        reader = await reading
        assert reader.text == TEXT[:10] and not reader.done
        assert reader.error is not None and reader.error["code"] == "stream_lost"
        answer = await whole
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "stream_lost"


async def test_a_rank_that_always_fails_does_not_keep_the_client_for_ever(launch):
    async with launch(max_fruitless_replays=3) as server:
        rank = server.ranks[0]
        rank.script, rank.finish = [], "error"
        reader = await Reader().read(server)
        assert reader.error is not None and reader.error["code"] == "stream_lost"
        assert len(rank.admitted) == 4
        await server.until(lambda: server.dispatcher.counters.num_failed == 1)


async def test_a_stream_that_draining_ranks_pass_on_again_and_again_is_nobodys_failure(launch):
    async with launch(max_fruitless_replays=1) as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 0
        reading = asyncio.create_task(Reader().read(server))
        for generation in range(4):
            await server.until(
                lambda number=generation: (
                    [r[0].generation for r in rank._running.values()] == [number]
                )
            )
            ((request, *_),) = rank._running.values()
            rank._running.clear()
            rank.say(request, TokenDelta(request.request_id, generation, 0, (), "abort"))
        rank.num_tokens_before_pause = None
        assert (await reading).is_whole
        assert server.dispatcher.counters.num_failed == 0


async def test_shutting_down_ends_streams_with_an_error_event_and_takes_nothing_new(launch):
    async with launch() as server:
        rank = server.ranks[0]
        rank.num_tokens_before_pause = 10
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: rank._running and next(iter(rank._running.values()))[1] == 10)
        await asyncio.sleep(0.05)
        await server.dispatcher.end_streams("going down")
        reader = await reading
        assert reader.text == TEXT[:10]
        assert reader.error is not None and reader.error["code"] == "shutting_down"
        await server.until(lambda: rank.aborted)
        answer = await server.client.post(CHAT_PATH, json=CHAT)
        assert answer.status_code == 503 and "going down" in answer.json()["error"]["message"]


async def test_a_waiting_stream_sends_comments_that_no_client_shows(launch):
    async with launch() as server:
        server.front._keep_alive_s = 0.02
        rank, lines = server.ranks[0], list[str]()
        rank.num_tokens_before_pause = 6

        async def read_lines() -> None:
            body = {**CHAT, "stream": True}
            async with server.client.stream("POST", CHAT_PATH, json=body) as response:
                async for line in response.aiter_lines():
                    lines.append(line)

        async def read_with_openai() -> str:
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
                chunks = await client.chat.completions.create(**CHAT, stream=True)
                said = [c.choices[0].delta.content async for c in chunks if c.choices]
            return "".join(filter(None, said))

        reading = asyncio.create_task(read_lines())
        shown = asyncio.create_task(read_with_openai())
        await server.until(lambda: sum(line.startswith(":") for line in lines) >= 3)
        rank.num_tokens_before_pause = None
        assert await shown == TEXT
        await reading
        assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_a_stream_that_may_not_be_replayed_ends_with_its_rank(launch):
    async with launch(num_ranks=2, max_fruitless_replays=0) as server:
        for rank in server.ranks:
            rank.num_tokens_before_pause = 6
        reading = asyncio.create_task(Reader().read(server))
        await server.until(lambda: any(rank._running for rank in server.ranks))
        name = next(rank.name for rank in server.ranks if rank._running)
        await asyncio.sleep(0.1)
        next(rank for rank in server.ranks if rank._running).kill()
        server.publish(**{name: "dead"})
        reader = await reading
        assert reader.text == TEXT[:6] and not reader.done
        assert "ingress.max_fruitless_replays" in reader.error["message"]
