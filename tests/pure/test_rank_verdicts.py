"""What a rank knows to be wrong with itself reaches the person who asks for the cluster's status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.link import Membership
from actors.peers import Description, Seat
from actors.target import TargetActor
from cluster.cli import main
from cluster.client import EndpointClient
from cluster.commands import control
from cluster.run_state import RunState, register
from configs.schema import ClusterConfig
from tests import ray_fakes

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32", "max_model_len": 512},
        "target": {"kv_cache_tokens": 4096, "max_batch_tokens": 64},
    }
)


@pytest.fixture
def shell() -> Iterator[Any]:
    seat = Seat("target-0", Membership.create(), "127.0.0.1")
    shell = TargetActor(seat, CONFIG, ray_fakes.FakeTarget, ray_fakes.fake_step_times)
    yield shell
    asyncio.run(shell.stop())


def await_description(shell: Any, wanted: Callable[[Description], bool]) -> Description:
    deadline = time.monotonic() + 10
    while not wanted(description := asyncio.run(shell.describe())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return description


def test_what_an_idle_rank_finds_left_behind_is_in_its_description_until_it_is_gone(
    shell: Any,
) -> None:
    await_description(shell, lambda d: d.phase == "ready")

    def lose_blocks() -> Any:
        shell._idle.note_step()
        return shell._rank.book.pool.lease(2)

    def find_them() -> None:
        shell._idle.note_step()
        lease.release()

    lease = asyncio.run(shell.on_loop(lose_blocks))
    found = await_description(shell, lambda d: bool(d.integrity_problems))
    assert "leases are open" in found.integrity_problems[0]
    assert asyncio.run(shell.stats())["idle_problems"] == list(found.integrity_problems)
    asyncio.run(shell.on_loop(find_them))
    await_description(shell, lambda d: not d.integrity_problems)


def test_status_says_what_is_wrong_with_a_rank_that_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = {"name": "target-0", "state": "ready", "integrity_problems": ["2 leases are open"]}
    health = {"status": "ready", "ranks": [{**rank, "warning": "rows depend on their batch"}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=health))
    monkeypatch.setattr(control, "EndpointClient", partial(EndpointClient, transport=transport))
    path = tmp_path / "running.json"
    state = RunState(1, "ready", "http://127.0.0.1:8000/v1", "smollm2", "fast", 0.0)
    with register(path, state):
        assert main(["status", "--state", str(path)]) == 0
    text = capsys.readouterr().out
    assert "target-0: rows depend on their batch" in text
    assert "target-0: left behind when idle: 2 leases are open" in text
