"""A group that shares experts loses a rank, over HTTP: health says so, and every stream goes on as it would have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.engine import upcycle
from configs.recipe import UpcycleRecipe
from tests.http.engine_rank import LETTERS
from tests.http.served import ServeProcess
from tests.torch_cpu.rank_engines import write_tiny_llama
from tests.torch_cpu.tiny_tokenizers import write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL, BOUND_S, MAX_LEN = "tiny-moe", 8.0, 256
BACK_WITHIN_S = 180.0
NUM_TOKENS = 150
STREAMS: list[dict[str, Any]] = [
    {"prompt": [5 + i, 40, 7 * i + 3], **how}
    for i in range(3)
    for how in ({"temperature": 0}, {"temperature": 1.0, "seed": 11 + i})
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    dense = tmp_path_factory.mktemp("dense")
    write_tiny_llama(dense)
    write_tokenizer(dense, LETTERS, specials=3)
    recipe = UpcycleRecipe(dense=str(dense), skew=2.0)
    folder = upcycle.upcycle(recipe, tmp_path_factory.mktemp("moe") / MODEL, progress=False)
    process = ServeProcess("tests.http.cluster_process", json.dumps(settings(folder)))
    yield process
    process.quit()


def settings(folder: Path) -> dict[str, Any]:
    return {
        "model": {
            "name": MODEL,
            "path": str(folder),
            "dtype": "float32",
            "drafter": "ngram",
            "max_model_len": MAX_LEN,
        },
        "target": {
            "num_ranks": 2,
            "group_size": 2,
            "num_cpus": 0.1,
            "kv_cache_tokens": 8192,
            "collective_timeout_s": BOUND_S,
            "rebalance_steps": 40,
        },
        "policy": {"name": "static_length", "static_length": 3},
        "drafter": {"num_cpus": 0.1, "gamma": 3},
        "ingress": {"replay_timeout_s": BACK_WITHIN_S, "proxy": "python"},
    }


class Watched:
    """A stream that tells how far it is."""

    def __init__(self) -> None:
        self.text, self.usage, self.is_done = "", {}, False

    async def read(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with client.stream("POST", "/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                self.is_done = self.is_done or data == "[DONE]"
                if not line or self.is_done or line.startswith(":"):  # a comment while it waits
                    continue
                event = json.loads(data)
                assert "error" not in event, event
                self.text += "".join(choice["text"] for choice in event["choices"])
                self.usage = event["usage"] or self.usage
        assert self.is_done, "a silent cut"


def body(how: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **how,
        **more,
    }


async def begin(client: httpx.AsyncClient, **more: Any) -> tuple[list[Watched], asyncio.Task[Any]]:
    streams = [Watched() for _ in STREAMS]
    reading = [
        stream.read(client, body(how, **more)) for stream, how in zip(streams, STREAMS, strict=True)
    ]
    return streams, asyncio.ensure_future(asyncio.gather(*reading))


def members(cluster: ServeProcess) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in json.loads(cluster.ask("members"))}


def until_settled(cluster: ServeProcess) -> None:
    cluster.until(lambda: cluster.ask("settled") == "True", BACK_WITHIN_S)


def kill(cluster: ServeProcess, name: str) -> None:
    os.kill(members(cluster)[name]["pid"], signal.SIGKILL)


def stop(cluster: ServeProcess, name: str) -> None:
    os.kill(members(cluster)[name]["pid"], signal.SIGSTOP)


def epochs(cluster: ServeProcess) -> set[int]:
    return {group["epoch"] for group in json.loads(cluster.ask("groups"))}


@pytest.mark.parametrize(("fault", "victim"), [(kill, "target-1"), (stop, "target-0")])
async def test_streams_of_a_group_that_loses_a_rank_go_on_with_the_very_tokens(
    cluster: ServeProcess, fault: Any, victim: str
) -> None:
    await asyncio.to_thread(until_settled, cluster)
    before, epoch = members(cluster), epochs(cluster)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=BACK_WITHIN_S * 2) as client:
        alone, reading = await begin(client, dspark={"speculation": False})
        await reading
        streams, reading = await begin(client)
        while not all(len(stream.text) > 15 for stream in streams):
            assert not reading.done()
            await asyncio.sleep(0.02)
        fault(cluster, victim)
        try:
            health = await until_red(client)
            assert health["status"] == "unavailable" and len(health["ranks"]) == 2
            assert not reading.done()
            await reading
        finally:
            with contextlib.suppress(ProcessLookupError):  # as it should be
                os.kill(before[victim]["pid"], signal.SIGCONT)
        assert (await client.get(health_url(client))).status_code == 200
    assert [stream.text for stream in streams] == [stream.text for stream in alone]
    assert all(stream.usage["completion_tokens"] == NUM_TOKENS for stream in streams)
    await asyncio.to_thread(check_formed_anew, cluster, before, epoch, victim)
    await asyncio.to_thread(cluster.until, lambda: cluster.ask("baseline") == "True", 30)


def health_url(client: httpx.AsyncClient) -> str:
    return str(client.base_url).removesuffix("/v1/") + "/health"


async def until_red(client: httpx.AsyncClient) -> dict[str, Any]:
    """Until no rank is ready; a bound that is far beyond that of the group, for a busy machine."""
    async with asyncio.timeout(20 * BOUND_S):
        while True:
            answer = await client.get(health_url(client))
            if answer.status_code == 503:
                found: dict[str, Any] = answer.json()
                return found
            await asyncio.sleep(0.05)


def check_formed_anew(
    cluster: ServeProcess, before: dict[str, dict[str, Any]], epoch: set[int], victim: str
) -> None:
    """Both processes are new, they are in one group of a later epoch, and the cause was found by its bound."""
    until_settled(cluster)
    after = members(cluster)
    ranks = ["target-0", "target-1"]
    assert not {after[name]["pid"] for name in ranks} & {before[name]["pid"] for name in ranks}
    assert all(after[name]["num_restarts"] > before[name]["num_restarts"] for name in ranks)
    now = epochs(cluster)
    assert len(now) == 1 and min(now) > max(epoch)
    other = ranks[1 - ranks.index(victim)]
    causes = f"{after[other]['last_failure']} {after[victim]['last_failure']}"
    assert f"within {BOUND_S:g} s" in causes or f"for {BOUND_S:g} s" in causes
