"""`dspark up`, `deploy`, `status`, `stop`, `down` with a launcher file, around a stand-in for Ray's commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import main
from cluster.commands import remote
from cluster.console import CommandError
from cluster.launcher_file import LauncherFile
from cluster.model_share import digest_of

ONPREM = Path(__file__).parents[2] / "configs" / "ray_up" / "onprem.yaml"
NODES = [
    {"address": "10.0.0.1", "name": "h0", "CPU": 0, "GPU": 0, "offers": "ingress"},
    {"address": "10.0.0.2", "name": "h1", "CPU": 2, "GPU": 0, "offers": "target"},
]
MEMBER = {"name": "target-0", "role": "target", "state": "ready", "node_ip": "10.0.0.2"}
MEMBER |= {"revision": 1, "num_restarts": 0, "reason": "", "last_failure": "", "pid": 7}


class Cluster:
    """What the launcher file's commands would do: notes each, answers what `dspark` on the head says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.sent: dict[str, Any] = {}
        self.nodes = [NODES[:1], NODES]  # what successive looks find
        self.broken_worker = ""
        self.aloud: set[str] = set()  # commands on the head that are listened to

    def ray(self, _file: LauncherFile, command: str, *arguments: str, **_: Any) -> str:
        self.calls.append((command, *arguments))
        if command == "rsync-up" and arguments[0].endswith(".yaml"):
            self.sent = yaml.safe_load(Path(arguments[0]).read_text())
        return ""

    def on_head(self, _file: LauncherFile, *command: str, aloud: bool = False) -> dict[str, Any]:
        self.calls.append(("head", *command))
        self.aloud |= {command[0]} if aloud else set()
        if command[0] == "status":
            nodes = self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]
            return {"deployed": False, "nodes": nodes}
        if command[0] == "deploy":
            return {"endpoint": "http://10.0.0.1:8000/v1", "model": "ours"}
        return {"stopped": True}

    def on_worker(self, _file: LauncherFile, address: str, line: str) -> None:
        self.calls.append((address, line))
        if address == self.broken_worker:
            raise CommandError(f"{address}: no route")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    stand_in = Cluster()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(remote, "POLL_INTERVAL_S", 0.0)
    for name in ("ray", "on_head", "on_worker"):
        call = getattr(stand_in, name)
        monkeypatch.setattr(LauncherFile, name, lambda *a, _call=call, **k: _call(*a, **k))
    return stand_in


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    values = {
        "cluster_name": "ours",
        "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]},
        "auth": {"ssh_user": "me"},
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
    }
    path.write_text(yaml.safe_dump(values))
    return str(path)


def last_object(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_up_makes_the_token_and_waits_for_every_machine(
    cluster: Cluster, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", file, "--json"]) == 0
    assert (tmp_path / ".ray" / "auth_token").is_file()
    assert cluster.calls[0][:2] == ("up", "--yes")
    assert cluster.calls[1:] == [("head", "status", "--cluster", "auto")] * 2
    assert last_object(capsys)["nodes"] == NODES


def test_up_gives_up_on_a_machine_that_does_not_come(
    cluster: Cluster, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.nodes = [NODES[:1]]
    monkeypatch.setattr(remote, "NODES_TIMEOUT_S", -1.0)
    assert main(["up", file]) == 1
    assert "1 of 2 machines" in capsys.readouterr().err


def test_deploy_sends_settings_as_they_were_written_and_the_models_folder(
    cluster: Cluster, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = [f"model.path={model}", "target.num_ranks=2", "model.dtype=auto"]
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["deploy", "--cluster", file, "--json", *arguments]) == 0
    there = f"~/dspark/models/{digest_of(model)[:16]}"
    assert cluster.calls[0] == ("exec", f"mkdir -p {there}")  # rsync makes one level only
    assert cluster.calls[1] == ("rsync-up", f"{model}/", f"{there}/")
    # Each machine decides its own number format.
    assert cluster.sent["model"] | {"dtype": "auto", "path": there} == cluster.sent["model"]
    assert cluster.sent["target"]["num_ranks"] == 2
    assert cluster.calls[-1] == (
        *("head", "deploy", "--cluster", "auto", "--config", "~/dspark/deploy.yaml"),
        *("--room-seconds", "30"),
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out)["endpoint"] == "http://10.0.0.1:8000/v1"
    assert cluster.aloud == {"deploy"}  # it takes minutes
    assert "copying the settings" in printed.err and "deploying from the head" in printed.err


def test_a_bad_setting_is_refused_before_anything_is_sent(cluster: Cluster, file: str) -> None:
    assert main(["deploy", "--cluster", file, "--set", "target.num_rank=2"]) == 2
    assert cluster.calls == []


def test_a_key_that_is_not_there_is_one_line_before_anything_is_sent(
    cluster: Cluster, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(Path(file).read_text())
    values["auth"]["ssh_private_key"] = "~/.ssh/none"
    Path(file).write_text(yaml.safe_dump(values))
    assert main(["deploy", "--cluster", file]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "auth.ssh_private_key: ~/.ssh/none" in line and "ssh-keygen" in line
    assert cluster.calls == []


def test_a_bundled_file_whose_user_was_not_edited_is_refused_before_anything_is_sent(
    cluster: Cluster, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(ONPREM.read_text())
    values["provider"] |= {"head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    Path(file).write_text(yaml.safe_dump(values))
    assert main(["deploy", "--cluster", file]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "auth.ssh_user is still 'EDIT-ME'; put your own there" in line
    assert cluster.calls == []


def test_down_ends_the_deployment_then_the_head_then_the_workers(
    cluster: Cluster, file: str
) -> None:
    assert main(["down", file]) == 0
    assert [call[0] for call in cluster.calls] == ["head", "exec", "down", "10.0.0.2"]
    assert cluster.calls[0][1] == "stop"
    # `ray down` itself looks for `ray` where a login finds none, and goes on without it.
    assert cluster.calls[1][1].startswith(". ~/dspark/setup/node.sh; ray stop")


def test_down_names_a_worker_that_was_not_reached(
    cluster: Cluster, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.broken_worker = "10.0.0.2"
    assert main(["down", file]) == 1
    assert "by hand: 10.0.0.2: no route" in capsys.readouterr().err


def test_status_shows_the_machines_and_fails_while_nothing_is_deployed(
    cluster: Cluster, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.nodes = [NODES]
    assert main(["status", "--cluster", file]) == 1
    printed = capsys.readouterr().out
    assert "10.0.0.2" in printed and "nothing is deployed" in printed


def test_status_shows_every_part_and_where_it_runs(
    cluster: Cluster, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"deployed": True, "nodes": NODES, "endpoint": "http://10.0.0.1:8000/v1"}
    report |= {"model": "ours", "numerics": "reproducible", "members": [MEMBER]}
    monkeypatch.setattr(LauncherFile, "on_head", lambda *_: report)
    assert main(["status", "--cluster", file]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 parts" in printed and "target-0" in printed


def test_profile_of_a_cluster_is_a_row_for_each_rank(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(name: str, slowness: float) -> dict[str, Any]:
        return {
            "name": name,
            "node_ip": "10.0.0.2",
            "identity": "abc",
            "batch_tokens": [1, 8],
            "step_time_s": [0.01 * slowness, 0.02 * slowness],
            "own_time_s": [0.004, 0.005 * slowness] if slowness > 2 else None,
        }

    report = {"ranks": [rank("target-0", 1), rank("target-1", 3)]}
    monkeypatch.setattr(LauncherFile, "on_head", lambda *_: report)
    assert main(["profile", "--cluster", file]) == 0
    printed = capsys.readouterr().out
    assert "10.00" in printed and "60.00 (15.00)" in printed and "8 tokens" in printed
    assert "in brackets" in printed
