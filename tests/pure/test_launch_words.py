"""What a start says while it goes on, around stand-ins for Ray and the members."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import launch as launcher
from cluster.parts import Parts
from configs.schema import ClusterConfig


class Session:
    """Stands for a Ray of our own."""

    is_local = True
    address, node_address = "127.0.0.1:1", "127.0.0.1"

    def __init__(self, *_: Any) -> None:
        pass

    def open(self, _num_cpus: float) -> None:
        pass

    def remember_processes(self) -> None:
        pass

    def close(self) -> None:
        pass


class Members:
    """Stands for the actors: there at once."""

    def __init__(self, parts: Parts, *_: Any, **__: Any) -> None:
        self.parts = parts

    def reserve(self, *_: Any, **__: Any) -> None:
        pass

    def start(self, *_: Any) -> None:
        pass


def never(*_: Any) -> Any:
    raise AssertionError("no engine is needed")


def started(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a start."""
    monkeypatch.setattr(launcher, "RaySession", Session)
    monkeypatch.setattr(launcher, "Members", Members)
    monkeypatch.setattr(launcher, "_await_ready", lambda _members, note: note("target-0 ready"))
    monkeypatch.setattr(launcher, "_running", None)
    parts = Parts(never, never, never, lambda _: "http://127.0.0.1:1/v1", lambda: None)
    lines: list[str] = []
    launcher.launch(config, lines.append, parts=parts)
    return lines


def test_every_long_step_is_named_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = started(ClusterConfig(), monkeypatch)
    assert [line.partition(" (")[0] for line in lines] == [
        "starting Ray",
        "Ray is up",
        "waiting for room for 1 ranks",
        "target-0 ready",
        "starting the ingress",
        "ingress ready at http://127.0.0.1:1/v1",
    ]


KEY = {"name": "me", "sha256": "0" * 64}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-box"])
def test_an_endpoint_that_everybody_may_use_is_one_warning(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig.model_validate({"ingress": {"host": host}})
    first, *others = started(config, monkeypatch)
    assert first.startswith(f"WARNING: ingress.host={host} ")
    assert "name keys in ingress.api_keys, or set ingress.host=127.0.0.1" in first
    assert not any("WARNING" in line for line in others)


@pytest.mark.parametrize(
    "ingress",
    [
        {"host": "127.0.0.1"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "api_keys": [KEY]},
    ],
)
def test_loopback_and_keys_need_no_warning(
    ingress: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = started(ClusterConfig.model_validate({"ingress": ingress}), monkeypatch)
    assert not any("WARNING" in line for line in lines)


def test_serves_own_start_logs_the_same_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launcher, "RaySession", Session)
    monkeypatch.setattr(launcher, "Members", Members)
    monkeypatch.setattr(launcher, "find", lambda _parts: None)
    monkeypatch.setattr(launcher, "_await_ready", lambda *_: None)
    parts = Parts(never, never, never, never, lambda: None)
    for keys in ([], [KEY]):
        config = {"ingress": {"host": "0.0.0.0", "api_keys": keys}}
        launcher.start_members(ClusterConfig.model_validate(config), parts)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "name keys in ingress.api_keys" in record.getMessage()
