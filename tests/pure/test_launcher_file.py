"""The launcher file: what is still to be edited is refused, what Ray needs beside it is given."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import launcher_file
from cluster.console import CommandError
from cluster.launcher_file import LauncherFile, ensure_token

FOLDER = Path(__file__).parents[2] / "configs" / "ray_up"
VALUES: dict[str, Any] = {
    "cluster_name": "ours",
    "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]},
    "auth": {"ssh_user": "me"},
}


def written(folder: Path, values: object) -> str:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize("name", ["onprem", "aws", "gcp"])
def test_a_bundled_file_is_refused_until_it_is_edited(name: str) -> None:
    with pytest.raises(CommandError, match="put your own there"):
        LauncherFile.read(str(FOLDER / f"{name}.yaml"))


def test_nodes_are_counted_as_the_provider_names_them(tmp_path: Path) -> None:
    ours = LauncherFile.read(written(tmp_path, VALUES))
    assert (ours.name, ours.num_nodes, ours.workers) == ("ours", 3, ("10.0.0.2", "10.0.0.3"))
    cloud = {
        "provider": {"type": "aws"},
        "head_node_type": "head",
        "available_node_types": {"head": {"min_workers": 9}, "gpu": {"min_workers": 2}, "x": {}},
    }
    rented = LauncherFile.read(written(tmp_path, cloud))
    assert (rented.num_nodes, rented.workers) == (3, ())


def test_only_our_own_machines_get_the_older_autoscaler(tmp_path: Path) -> None:
    assert (
        LauncherFile.read(written(tmp_path, VALUES)).environment["RAY_UP_enable_autoscaler_v2"]
        == "0"
    )
    cloud = LauncherFile.read(written(tmp_path, {"provider": {"type": "aws"}}))
    assert cloud.environment["RAY_AUTH_MODE"] == "token"
    assert "RAY_UP_enable_autoscaler_v2" not in cloud.environment


@pytest.mark.parametrize("values", [[], {"cluster_name": "x"}, {"provider": 3}])
def test_what_is_no_launcher_file_is_refused(tmp_path: Path, values: object) -> None:
    with pytest.raises(CommandError, match="no launcher file"):
        LauncherFile.read(written(tmp_path, values))


def test_an_unreadable_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="not readable") as refused:
        LauncherFile.read(str(tmp_path / "none.yaml"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["ssh_private_key", "ssh_public_key"])
def test_a_key_that_is_not_there_is_refused_in_one_line(tmp_path: Path, field: str) -> None:
    key = tmp_path / "key"
    path = written(tmp_path, VALUES | {"auth": {"ssh_user": "me", field: str(key)}})
    with pytest.raises(CommandError, match=rf"auth\.{field}: {key} .*ssh-keygen") as refused:
        LauncherFile.read(path)
    assert "\n" not in str(refused.value)
    key.touch()
    LauncherFile.read(path)


@pytest.mark.parametrize("key", ["~nobody-of-that-name/key", None])
def test_a_key_that_cannot_be_named_so_is_refused(tmp_path: Path, key: object) -> None:
    values = VALUES | {"auth": {"ssh_user": "me", "ssh_private_key": key}}
    with pytest.raises(CommandError, match=r"auth\.ssh_private_key"):
        LauncherFile.read(written(tmp_path, values))


@pytest.mark.parametrize("auth", [{}, {"ssh_user": None}, "me"])
def test_machines_of_our_own_need_a_user(tmp_path: Path, auth: object) -> None:
    with pytest.raises(CommandError, match=r"auth\.ssh_user is missing; name"):
        LauncherFile.read(written(tmp_path, VALUES | {"auth": auth}))


def test_a_mount_that_is_not_there_says_what_makes_it(tmp_path: Path) -> None:
    values = VALUES | {"file_mounts": {"~/dspark/setup": str(tmp_path / "dist")}}
    with pytest.raises(CommandError, match="make dist"):
        LauncherFile.read(written(tmp_path, values)).require_mounts()
    (tmp_path / "dist").mkdir()
    LauncherFile.read(written(tmp_path, values)).require_mounts()


def test_the_token_is_made_once_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = ensure_token()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(path.read_text()) == 64
    before = path.read_text()
    assert ensure_token().read_text() == before


class Ray:
    """Stands for Ray's command: notes what it was asked, says what it is told."""

    def __init__(self, says: str, code: int = 0) -> None:
        self.says, self.code = says, code
        self.commands: list[list[str]] = []
        self.environment: dict[str, str] = {}

    def __call__(self, command: list[str], **options: Any) -> Done:
        self.commands.append(command)
        self.environment = options.get("env", dict(os.environ))
        is_asked = options.get("stdout", 0) == -1
        return Done(self.code, io.StringIO(self.says, newline="") if is_asked else None)


@dataclass
class Done:
    """Stands for a process that has ended."""

    returncode: int
    stdout: io.StringIO | None
    stderr: str = "no way"

    def __enter__(self) -> Done:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_the_heads_answer_is_found_among_what_ray_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray('Fetched IP: 10.0.0.1\r\n{"nodes": [1, 2]}\r\nShared connection closed.\r\n')
    monkeypatch.setattr(subprocess, "Popen", ray)
    file = LauncherFile.read(written(tmp_path, VALUES))
    assert file.on_head("status", "--cluster", "auto") == {"nodes": [1, 2]}
    line = ray.commands[0][-1]
    assert line.startswith(". ~/dspark/setup/node.sh; dspark status --cluster auto --json")
    assert ray.environment["RAY_UP_enable_autoscaler_v2"] == "0"


def test_what_the_head_says_meanwhile_is_said_here_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    command = tmp_path / "python"  # answers only when its first line was heard
    command.write_text(
        "#!/bin/sh\n"
        "printf 'Ray is up (1.0 s)\\r\\n 10%%\\r 20%%\\r\\ndspark: no room\\r\\n'\n"
        f"for i in $(seq 200); do [ -e {heard} ] && break; sleep 0.05; done\n"
        f"[ -e {heard} ] && echo '{{\"endpoint\": 1}}'\n"
    )
    command.chmod(0o700)
    said: list[tuple[str, str]] = []

    def note(text: str, *, end: str = "\n") -> None:
        heard.touch()
        said.append((text, end))

    monkeypatch.setattr(sys, "executable", str(command))
    monkeypatch.setattr(launcher_file, "note", note)
    file = LauncherFile.read(written(tmp_path, VALUES))
    assert file.on_head("deploy", aloud=True) == {"endpoint": 1}
    assert said == [("Ray is up (1.0 s)", "\n"), (" 10%", "\r"), (" 20%", "\n")]
    said.clear()
    assert file.on_head("status") == {"endpoint": 1} and said == []


def test_what_is_wrong_on_the_head_is_wrong_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LauncherFile.read(written(tmp_path, VALUES))
    said = json.dumps({"error": "no room for 4 ranks"})
    monkeypatch.setattr(subprocess, "Popen", Ray(said))
    with pytest.raises(CommandError, match="no room for 4 ranks"):
        file.on_head("deploy")
    monkeypatch.setattr(subprocess, "Popen", Ray("Traceback: boom"))
    with pytest.raises(CommandError, match="boom"):
        file.on_head("deploy")
    monkeypatch.setattr(subprocess, "Popen", Ray("ssh: no route", code=1))
    with pytest.raises(CommandError, match="ssh: no route"):
        file.on_head("deploy")


def test_a_worker_is_reached_as_ray_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray("")
    monkeypatch.setattr(subprocess, "run", ray)
    monkeypatch.setenv("HOME", str(tmp_path))
    key = tmp_path / ".ssh" / "k"
    key.parent.mkdir()
    key.touch()
    auth = {"ssh_user": "me", "ssh_private_key": "~/.ssh/k"}
    file = LauncherFile.read(written(tmp_path, VALUES | {"auth": auth}))
    file.on_worker("10.0.0.2", "ray stop")
    command = ray.commands[0]
    assert command[-2:] == ["me@10.0.0.2", ". ~/dspark/setup/node.sh; ray stop"]
    assert command[command.index("-i") + 1] == str(key)
    ray.code = 255
    with pytest.raises(CommandError, match=r"10\.0\.0\.2: ray stop: no way"):
        file.on_worker("10.0.0.2", "ray stop")
