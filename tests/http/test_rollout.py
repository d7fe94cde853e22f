"""`dspark rollout` under eight running streams: not one fails, and every token is the one it would have been."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from actors.engine.drafters.checkpoint import save_drafter
from tests.http.engine_rank import LETTERS
from tests.http.served import ROOT, ServeProcess
from tests.http.test_group_death import Watched
from tests.torch_cpu.rank_engines import real_drafter_model, write_tiny_llama
from tests.torch_cpu.tiny_tokenizers import write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL, NUM_TOKENS = "tiny", 60
STREAMS: list[dict[str, Any]] = [
    {"prompt": [5 + i, 40, 7 * i + 3], **how}
    for i in range(4)
    for how in ({"temperature": 0}, {"temperature": 1.0, "seed": 11 + i})
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two drafters for it, and one for another target."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "target").mkdir()
    write_tiny_llama(folder / "target")
    write_tokenizer(folder / "target", LETTERS, specials=3)
    model = real_drafter_model(3)
    save_drafter(model, folder / "first")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_drafter(model, folder / "second")
    save_drafter(model, folder / "misfit")
    declared = folder / "misfit" / "config.json"
    declared.write_text(json.dumps({**json.loads(declared.read_text()), "hidden_size": 48}))
    return folder


@pytest.fixture(scope="module")
def cluster(models: Path) -> Iterator[ServeProcess]:
    settings = {
        "model": {
            "name": MODEL,
            "path": str(models / "target"),
            "drafter": str(models / "first"),
            "dtype": "float32",
            "max_model_len": 128,
        },
        "target": {"num_ranks": 2, "num_cpus": 0.1, "kv_cache_tokens": 4096},
        "policy": {"name": "static_length", "static_length": 3},
        "drafter": {"num_cpus": 0.1, "num_actors": 2, "gamma": 3},
        "ingress": {"replay_timeout_s": 300.0, "proxy": "python"},
    }
    process = ServeProcess("tests.http.cluster_process", json.dumps(settings))
    yield process
    process.quit()


@pytest.fixture(autouse=True)
def settled(cluster: ServeProcess) -> None:
    cluster.until(lambda: cluster.ask("settled") == "True", 120)


def members(cluster: ServeProcess) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in json.loads(cluster.ask("members"))}


async def read(client: httpx.AsyncClient, how: dict[str, Any]) -> str:
    body = {"model": MODEL, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **how}
    body["stream_options"] = {"include_usage": True}
    stream = Watched()
    await stream.read(client, body)
    return stream.text


@asynccontextmanager
async def streams(cluster: ServeProcess) -> AsyncIterator[list[str]]:
    """Eight clients that ask again and again until the block ends, once at least; yields what differed."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as client:
        expected = await asyncio.gather(*(read(client, how) for how in STREAMS))
        is_over, wrong = asyncio.Event(), list[str]()

        async def go_on(how: dict[str, Any], text: str) -> None:
            while True:
                found = await read(client, how)
                if found != text:
                    wrong.append(f"{how}: {found!r}, undisturbed {text!r}")
                if is_over.is_set():
                    return

        reading = [
            asyncio.create_task(go_on(how, text))
            for how, text in zip(STREAMS, expected, strict=True)
        ]
        try:
            yield wrong
        finally:
            is_over.set()
            await asyncio.gather(*reading)  # raises what a stream met


def dspark(cluster: ServeProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the object on the last line."""
    address = cluster.ask("address")
    done = subprocess.run(
        [sys.executable, "-m", "cluster", *arguments, "--cluster", address, "--json"],
        cwd=ROOT,
        env={
            **os.environ,
            "HOME": str(cluster.home),
            "RAY_TMPDIR": str(cluster.home),
            "RAY_AUTH_MODE": "token",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


async def rolled_out(cluster: ServeProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """`dspark rollout` under the streams; every one of them is right."""
    async with streams(cluster) as wrong:
        result = await asyncio.to_thread(dspark, cluster, "rollout", *arguments)
    assert not wrong, wrong[:3]
    return result


async def test_settings_reach_every_rank_and_no_stream_notices(cluster: ServeProcess) -> None:
    before = members(cluster)
    code, report = await rolled_out(
        cluster, "--set", "target.max_running=7", "--drain-seconds", "0"
    )
    assert (code, report["outcome"]) == (0, "done"), report
    assert [m["name"] for m in report["members"]] == ["target-0", "target-1"]
    assert {m["outcome"] for m in report["members"]} == {"done"}
    assert report["failed_streams"] == 0 and report["moved_streams"] > 0
    assert report["seconds"] > 0 and all(m["seconds"] > 0 for m in report["members"])
    after = members(cluster)
    assert {m["revision"] for m in after.values()} == {report["revision"]}
    assert all(after[name]["pid"] != before[name]["pid"] for name in ("target-0", "target-1"))
    assert after["drafter-0"]["pid"] == before["drafter-0"]["pid"]
    metrics = httpx.get(cluster.url.removesuffix("/v1") + "/metrics").text
    assert 'dspark:max_running_requests{rank="target-1"} 7.0' in metrics


async def test_drafter_weights_are_replaced_and_no_stream_notices(
    cluster: ServeProcess, models: Path
) -> None:
    before = members(cluster)
    code, report = await rolled_out(cluster, "--drafter", str(models / "second"))
    assert (code, report["outcome"], report["failed_streams"]) == (0, "done", 0), report
    assert [m["name"] for m in report["members"]] == ["drafter-0", "drafter-1"]
    after = members(cluster)
    for name in ("drafter-0", "drafter-1"):
        assert after[name]["spec"]["identity"] != before[name]["spec"]["identity"]
    assert after["target-0"]["pid"] == before["target-0"]["pid"]
    health = httpx.get(cluster.url.removesuffix("/v1") + "/health").json()
    others = {other["name"]: other["revision"] for other in health["others"]}
    assert others["drafter-0"] == others["drafter-1"] == report["revision"]
    # What is started again by a crash runs what was rolled out, not what was deployed.
    cluster.ask("kill drafter-0")
    cluster.until(
        lambda: members(cluster)["drafter-0"]["num_restarts"] > after["drafter-0"]["num_restarts"],
        120,
    )
    cluster.until(lambda: cluster.ask("settled") == "True", 120)
    again = members(cluster)["drafter-0"]
    assert again["spec"]["identity"] == after["drafter-0"]["spec"]["identity"]


async def test_a_misfit_drafter_is_refused_before_anything_is_touched(
    cluster: ServeProcess, models: Path
) -> None:
    before = members(cluster)
    code, report = await asyncio.to_thread(
        dspark, cluster, "rollout", "--drafter", str(models / "misfit")
    )
    assert code == 1 and "nothing was changed" in report["error"], report
    assert "misfit" in report["error"]
    told = ("state", "pid", "revision", "spec")  # its memory may have grown
    for name, member in members(cluster).items():
        assert [member[key] for key in told] == [before[name][key] for key in told]


async def test_settings_with_which_a_rank_does_not_come_up_are_rolled_back(
    cluster: ServeProcess,
) -> None:
    before = members(cluster)
    code, report = await rolled_out(
        cluster, "--set", "target.kv_cache_tokens=1000000000000000", "--drain-seconds", "0"
    )
    assert (code, report["outcome"], report["failed_streams"]) == (1, "failed", 0), report
    assert [m["outcome"] for m in report["members"]] == ["rolled back", "waiting"]
    assert "target-0 does not come up" in report["reason"]
    after = members(cluster)
    assert after["target-0"]["revision"] == before["target-0"]["revision"]
    assert after["target-0"]["state"] == "ready"
    assert after["target-1"]["pid"] == before["target-1"]["pid"]


async def test_what_cannot_be_rolled_out_is_refused_by_name(cluster: ServeProcess) -> None:
    code, report = await asyncio.to_thread(
        dspark, cluster, "rollout", "--set", "target.num_ranks=3"
    )
    assert code == 1 and "target.num_ranks (2 → 3)" in report["error"]


async def test_a_drained_rank_gets_no_new_stream_until_it_is_let_go(cluster: ServeProcess) -> None:
    code, report = await asyncio.to_thread(dspark, cluster, "drain", "target-1")
    assert (code, report) == (0, {"members": ["target-1"]})
    cluster.until(lambda: members(cluster)["target-1"]["phase"] == "draining", 20)
    code, report = await asyncio.to_thread(dspark, cluster, "drain", "target-0")
    assert code == 1 and "no other rank would take streams" in report["error"]
    async with streams(cluster) as wrong:
        pass
    assert not wrong
    metrics = httpx.get(cluster.url.removesuffix("/v1") + "/metrics").text
    assert 'dspark:member_draining{member="target-1",role="target"} 1.0' in metrics
    assert 'dspark:running_requests{rank="target-1"} 0.0' in metrics
    code, _ = await asyncio.to_thread(dspark, cluster, "undrain", "target-1")
    assert code == 0
    cluster.until(lambda: cluster.ask("settled") == "True", 20)
