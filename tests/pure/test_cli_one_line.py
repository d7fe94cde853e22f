"""An error of a command that speaks to a cluster is one line: found before joining if possible, and Ray keeps quiet."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cluster import ray_session
from cluster.cli import main
from cluster.commands import remote
from cluster.ray_session import RaySession


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "/no/such/folder"], "no such folder"),
        (["--config", "/no/such.yaml"], "neither a preset nor a file"),
        (["--config", "laptop-cpu", "--set", "drafter.gamma=0"], "drafter.gamma"),
    ],
)
def test_what_this_machine_can_refuse_is_refused_before_the_cluster_is_reached(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "joined", lambda _address: pytest.fail("it was joined"))
    assert main(["rollout", *arguments, "--cluster", "auto"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_joining_a_cluster_says_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray_session.ray, "init", lambda **options: given.update(options))
    monkeypatch.setattr(ray_session, "maybe_enable_token_auth_if_token_available", lambda **_: None)
    monkeypatch.setattr(ray_session, "_log_what_ray_prints", lambda: None)
    RaySession("10.0.0.1:6379", "dspark").open(0)
    assert given["logging_level"] == logging.ERROR and not given["log_to_driver"]
