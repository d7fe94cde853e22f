"""Room for the ranks on machines that Ray has, or may still rent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from cluster import launch, members
from cluster.cli import main
from cluster.members import Members, NoRoomError
from cluster.placement import plan_placement
from configs.schema import ClusterConfig


@pytest.mark.parametrize(("grows", "waits_s"), [(True, 900.0), (False, 0.0)])
def test_it_waits_for_machines_that_may_come_and_says_what_to_change_when_none_has(
    monkeypatch: pytest.MonkeyPatch, grows: bool, waits_s: float
) -> None:
    waited: list[float] = []

    def never(_refs: Any, timeout: float) -> None:
        waited.append(timeout)
        raise GetTimeoutError

    pool = SimpleNamespace(ready=lambda: "soon")
    monkeypatch.setattr(members, "placement_group", lambda *_, **__: pool)
    monkeypatch.setattr(members.ray, "get", never)
    monkeypatch.setattr(members.ray, "cluster_resources", lambda: {"CPU": 1.0})
    config = ClusterConfig.model_validate({"target": {"num_ranks": 4, "num_gpus": 1}})
    started = Members(SimpleNamespace(), room_timeout_s=900.0)  # type: ignore[arg-type]
    with pytest.raises(NoRoomError, match="no room for 4 ranks") as refused:
        started.reserve(plan_placement(config, 4), grows)
    assert waited == [waits_s]
    assert str(refused.value).endswith("--room-seconds 900") is grows


def test_deploy_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def launched(_config: Any, _note: Any, address: str, **more: Any) -> Any:
        given.update(more, address=address)
        return SimpleNamespace(endpoint_url="http://h:8000/v1")

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(launch, "shutdown", lambda: None)
    assert main(["deploy", "--cluster", "auto", "--room-seconds", "900"]) == 0
    assert given == {"address": "auto", "outlives": True, "room_timeout_s": 900.0}
