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
