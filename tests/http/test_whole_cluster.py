"""HTTP, Serve, real actors and links; only the models are scripted. Processes are killed under load."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.model_files import text_files
from cluster.text import TextCodec
from tests.http.served import ServeProcess
from tests.ray_fakes import stream_after

MODEL = "smollm2-135m-instruct"
CODEC = TextCodec.from_directory(text_files("smollm2-135m"))

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServeProcess]:
    process = ServeProcess("tests.http.cluster_process")
    yield process
    process.quit()


@pytest.fixture(autouse=True)
def settled(cluster: ServeProcess) -> None:
    cluster.until(lambda: cluster.ask("settled") == "True", 60)


def expected(prompt: list[int], num_tokens: int) -> str:
    detokenizer = CODEC.detokenizer()
    shown = (i for i in stream_after(prompt, num_tokens) if i not in CODEC.special_ids)
    return "".join(detokenizer.feed(i) for i in shown) + detokenizer.flush()


async def read(
    client: httpx.AsyncClient, prompt: list[int], num_tokens: int, **more: Any
) -> dict[str, Any]:
    """The id and text of a streamed completion, and its usage."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    text, usage, done, response_id = "", {}, False, ""
    async with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            done = done or data == "[DONE]"
            if not line or done or line.startswith(":"):
                continue
            event = json.loads(data)
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event["usage"] or usage
            response_id = event["id"]
    assert done, "a silent cut"
    return {"id": response_id, "text": text, "usage": usage}


def requests(
    count: int, seed: int, least: int = 100, most: int = 300
) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    return [
        ([rng.randrange(17, 900) for _ in range(rng.randint(1, 40))], rng.randint(least, most))
        for _ in range(count)
    ]


async def read_all(url: str, wanted: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(read(client, *one) for one in wanted))


def check(wanted: list[tuple[list[int], int]], answers: list[dict[str, Any]]) -> None:
    for (prompt, num_tokens), answer in zip(wanted, answers, strict=True):
        assert answer["text"] == expected(prompt, num_tokens)
        assert answer["usage"]["completion_tokens"] == num_tokens


async def test_32_streams_are_exact_speculated_and_leave_nothing(cluster):
    wanted = requests(32, seed=1)
    answers = await read_all(cluster.url, wanted)
    check(wanted, answers)
    counts = [answer["usage"]["dspark"] for answer in answers]
    assert sum(c["num_accepted"] for c in counts) > 0
    assert all(c["num_proposed"] >= c["num_scheduled"] >= c["num_accepted"] for c in counts)
    await asyncio.to_thread(cluster.until, lambda: cluster.ask("baseline") == "True", 20)


def num_replayed(cluster: ServeProcess) -> int:
    metrics = httpx.get(cluster.url.removesuffix("/v1") + "/metrics").text
    return int(float(metrics.partition("\ndspark:num_replayed_total{")[2].split()[1]))


@pytest.mark.parametrize("victim", ["target-0", "drafter-0", "allocator"])
async def test_killing_a_part_under_load_loses_and_repeats_no_token(cluster, victim):
    before = num_replayed(cluster)
    wanted = requests(16, seed=2, least=1200, most=1400)  # long enough to outlive a slow kill
    reading = asyncio.create_task(read_all(cluster.url, wanted))
    await asyncio.sleep(0.3)
    assert await asyncio.to_thread(cluster.ask, f"kill {victim}") == "killed"
    assert not reading.done()
    check(wanted, await reading)
    # Half of the streams had run there; no other death concerns a stream.
    replayed = num_replayed(cluster) - before
    assert replayed >= 4 if victim == "target-0" else replayed == 0


async def test_clients_that_leave_give_everything_back(cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:

        async def leave(delay_s: float, prompt: list[int], num_tokens: int) -> None:
            reading = asyncio.create_task(read(client, prompt, num_tokens))
            await asyncio.sleep(delay_s)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        wanted = requests(24, seed=3)
        await asyncio.gather(*(leave(0.03 * i, *one) for i, one in enumerate(wanted)))
    await asyncio.to_thread(cluster.until, lambda: cluster.ask("baseline") == "True", 20)


async def explained(url: str, response_id: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await client.get(f"/requests/{response_id}/explain")


async def test_every_round_is_explained_and_those_that_died_with_their_rank_are_counted(cluster):
    asking = {"dspark": {"explain": True}}
    wanted = requests(6, seed=5, least=1200, most=1400)
    limits = httpx.Limits(max_connections=20)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        reading = asyncio.gather(*(read(client, *one, **asking) for one in wanted))
        await asyncio.sleep(0.5)
        assert await asyncio.to_thread(cluster.ask, "kill target-0") == "killed"
        answers = await reading
        plain = await read(client, [5, 6], 20)
    check(wanted, answers)
    num_lost = []
    for (_, num_tokens), answer in zip(wanted, answers, strict=True):
        (choice,) = (await explained(cluster.url, answer["id"])).json()["choices"]
        last = choice["segments"][-1]
        assert last["has_ended"]
        end = last["rounds"][-1]
        assert end["first_index"] + end["num_committed"] == num_tokens
        assert {each["cut_by"] for each in last["rounds"]} & {"price", "budget", "cold", "none"}
        num_lost.append(choice["num_lost_tokens"])
    assert any(num_lost) and not all(num_lost)  # only those of the rank that was killed
    off = await explained(cluster.url, plain["id"])
    assert (off.status_code, off.json()["error"]["code"]) == (404, "explain_off")
    unknown = await explained(cluster.url, "cmpl-nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
