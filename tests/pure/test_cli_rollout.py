"""`dspark rollout`, `drain`, `undrain`: what they ask for, refuse, show and send to the head of another cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.cli import main
from cluster.client import EndpointClient
from cluster.commands import reach, remote, rollout
from cluster.console import CommandError
from cluster.launcher_file import LauncherFile
from cluster.parts import DrafterCheck, DrafterMisfitError
from configs.load import load

RUNNING = load("laptop-cpu", environment={})
STEP = {"role": "target", "note": "", "seconds": 2.0, "moved_streams": 3}
PROGRESS = {
    "outcome": "running",
    "reason": "",
    "revision": 2,
    "steps": [
        {**STEP, "members": ["target-0"], "phase": "done"},
        {**STEP, "members": ["target-1"], "phase": "draining", "note": "4 streams run"},
    ],
}


class Deployed:
    """A deployment on a Ray that is joined: notes what is asked of its supervisor and gives prepared answers."""

    def __init__(self, *ends: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.checked: list[Any] = []
        self.shared: list[dict[str, str]] = []
        self.misfit = ""
        self.remarks: tuple[str, ...] = ()
        self.ends = list(ends)  # successive answers to rollout_progress
        self.num_failed = 0
        self.deployment = SimpleNamespace(is_local=True, endpoint="http://here:8000/v1")
        parts = SimpleNamespace(check_drafter=self.check, share_models=self.share)
        self.members = SimpleNamespace(parts=parts, share_more=self.shared.append)

    def check(self, config: Any) -> DrafterCheck:
        self.checked.append(config.model.drafter)
        if self.misfit:
            raise DrafterMisfitError(self.misfit)
        return DrafterCheck((1, 2), self.remarks)

    def share(self, config: Any) -> Any:
        model = config.model.model_copy(update={"drafter": "sha256:abc"})
        return config.model_copy(update={"model": model}), {"abc": str(config.model.drafter)}

    def ask(self, _found: Any, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *arguments))
        if method == "settings":
            return RUNNING.model_dump(mode="json")
        if method == "rollout":
            return PROGRESS
        if method == "rollout_progress":
            answer = self.ends.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return ["target-1"]

    @property
    def wish(self) -> Any:
        (wish,) = [asked[1] for asked in self.asked if asked[0] == "rollout"]
        return wish


def over(outcome: str = "done", **more: Any) -> dict[str, Any]:
    return {**PROGRESS, "outcome": outcome, **more}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Deployed:
    stand_in = Deployed(over())

    @contextmanager
    def joined(_address: str) -> Iterator[Any]:
        yield stand_in

    def metrics(_request: httpx.Request) -> httpx.Response:
        lines = [f'dspark:num_failed_total{{ingress="i{i}"}} {stand_in.num_failed}.0' for i in "ab"]
        return httpx.Response(200, text="\n".join(lines))

    transport = httpx.MockTransport(metrics)
    monkeypatch.setattr(rollout, "EndpointClient", partial(EndpointClient, transport=transport))
    monkeypatch.setattr(remote, "joined", joined)
    monkeypatch.setattr(reach, "ask", stand_in.ask)
    monkeypatch.setattr(rollout, "POLL_INTERVAL_S", 0.0)
    return stand_in


def run(*arguments: str) -> int:
    return main([*arguments, "--cluster", "auto"])


def test_a_setting_is_changed_in_what_runs_and_the_rest_stays(
    cluster: Deployed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK__TARGET__NUM_RANKS", "9")  # of another cluster
    assert run("rollout", "--set", "target.max_running=7", "--drain-seconds", "2", "--json") == 0
    wish = cluster.wish
    assert wish.config == load(
        RUNNING.model_dump(mode="json"), ["target.max_running=7"], environment={}
    )
    assert wish.taps is None and cluster.checked == [], "no drafter changes"
    assert (wish.bounds.drain_s, wish.bounds.start_s, wish.bounds.allows_pause) == (2, 900, False)
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report["moved_streams"] == 6 and report["failed_streams"] == 0
    assert [m["name"] for m in report["members"]] == ["target-0", "target-1"]
    assert {"seconds", "outcome", "moved_streams"} <= set(report["members"][0])
    assert "[2/2] target-1: draining (4 streams run)" in printed.err


def test_a_drafter_is_loaded_once_before_anything_is_touched(
    cluster: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.remarks = ("there is no calibration.json; run `dspark calibrate`",)
    assert run("rollout", "--drafter", str(tmp_path)) == 0
    assert cluster.checked == [str(tmp_path)] and cluster.wish.taps == (1, 2)
    assert cluster.wish.config.model.drafter == str(tmp_path) and cluster.shared == []
    printed = capsys.readouterr()
    assert "WARNING: there is no calibration.json" in printed.err
    assert "revision 2: done" in printed.out and "failed 0" in printed.out


def test_machines_without_a_common_disk_get_the_drafter_by_its_content(
    cluster: Deployed, tmp_path: Path
) -> None:
    cluster.deployment.is_local = False
    assert run("rollout", "--drafter", str(tmp_path)) == 0
    assert cluster.wish.config.model.drafter == "sha256:abc"
    assert cluster.shared == [{"abc": str(tmp_path)}]


def test_a_drafter_that_does_not_fit_stops_it_before_it_begins(
    cluster: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.misfit = "hidden_size=48: train it for this target"
    assert run("rollout", "--drafter", str(tmp_path)) == 1
    assert "nothing was changed: hidden_size=48" in capsys.readouterr().err
    assert [method for method, *_ in cluster.asked] == ["settings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to roll out"),
        (["--drafter", "/no/such/folder"], "no such folder"),
        (["--set", "target.max_runing=3"], "did you mean target.max_running"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    cluster: Deployed, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("rollout", *arguments) != 0
    assert message in capsys.readouterr().err


def test_weights_cannot_be_replaced_in_the_folder_that_runs(tmp_path: Path) -> None:
    running = RUNNING.model_dump(mode="json")
    running["model"]["drafter"] = str(tmp_path)
    arguments = SimpleNamespace(set=[], drafter=str(tmp_path), config=None)
    with pytest.raises(CommandError, match="a folder of their own"):
        rollout.wanted_settings(running, arguments)  # type: ignore[arg-type]


def test_a_rollout_that_fails_says_why_and_how_many_streams_it_cost(
    cluster: Deployed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {**PROGRESS["steps"][0], "phase": "rolled back"}
    cluster.ends = [over("failed", reason="target-0 does not come up: MemoryError", steps=[step])]
    ask = cluster.ask

    def failing(found: Any, method: str, *arguments: Any) -> Any:
        cluster.num_failed += method == "rollout_progress"
        return ask(found, method, *arguments)

    monkeypatch.setattr(reach, "ask", failing)
    assert run("rollout", "--set", "target.max_running=7") == 1
    printed = capsys.readouterr().out
    assert "MemoryError" in printed and "rolled back" in printed and "failed 2" in printed


def test_a_front_that_cannot_be_asked_leaves_the_count_unknown(
    cluster: Deployed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    transport = httpx.MockTransport(gone)
    monkeypatch.setattr(rollout, "EndpointClient", partial(EndpointClient, transport=transport))
    assert run("rollout", "--set", "target.max_running=7") == 0
    assert "failed unknown" in capsys.readouterr().out


def test_ctrl_c_lets_the_member_whose_turn_it_is_end_its_turn(cluster: Deployed) -> None:
    cluster.ends = [KeyboardInterrupt(), over("stopped", reason="it was asked to stop")]
    assert run("rollout", "--set", "target.max_running=7") == 1
    assert ("stop_rollout",) in cluster.asked


def test_a_supervisor_that_is_away_for_a_moment_is_waited_for_and_not_for_ever(
    cluster: Deployed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = reach.SupervisorAwayError("the supervisor does not answer")
    cluster.ends = [away, away, over()]
    assert run("rollout", "--set", "target.max_running=7") == 0
    cluster.ends = [away]
    monkeypatch.setattr(rollout, "LOST_AFTER_S", -1.0)
    assert run("rollout", "--set", "target.max_running=7") == 1
    cluster.ends = [over("none", steps=[])]
    assert run("rollout", "--set", "target.max_running=7") == 1
    assert "the same `dspark rollout` goes on" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "is_drained"), [("drain", True), ("undrain", False)])
def test_a_rank_is_drained_and_let_go_by_name(
    cluster: Deployed, command: str, is_drained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "target-1", "--json") == 0
    assert cluster.asked == [("drain", "target-1", is_drained)]
    assert json.loads(capsys.readouterr().out) == {"members": ["target-1"]}
    assert run(command, "target-1") == 0
    assert "target-1: take" in capsys.readouterr().out


def test_without_a_cluster_here_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(tmp_path / "none.json")
    assert main(["rollout", "--state", state, "--set", "target.max_running=7"]) == 1
    assert "start one with `dspark serve`" in capsys.readouterr().err


def test_another_cluster_gets_the_new_weights_on_its_head_and_rolls_out_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[str] = []
    asked: list[tuple[str, ...]] = []

    def on_head(_file: LauncherFile, *command: str, aloud: bool = False) -> dict[str, Any]:
        assert aloud == (command[0] == "rollout")  # it takes minutes
        asked.append(command)
        return {"outcome": "done", "members": ["target-1"]}

    def send(_file: LauncherFile, what: str, *_: Any) -> str:
        sent.append(what)
        return f"~/dspark/{Path(what).name}"

    monkeypatch.setattr(LauncherFile, "read", classmethod(lambda cls, path: cls(Path(path), {})))
    monkeypatch.setattr(LauncherFile, "on_head", on_head)
    monkeypatch.setattr(remote, "send_folder", send)
    monkeypatch.setattr(remote, "send_settings", send)
    weights = tmp_path / "weights"
    weights.mkdir()
    where = ["--cluster", "ours.yaml", "--json"]
    options = ["--drafter", str(weights), "--set", "drafter.gamma=3", "--allow-pause"]
    assert main(["rollout", *options, *where]) == 0
    (command,) = asked
    assert command[:3] == ("rollout", "--cluster", "auto") and "--allow-pause" in command
    assert command[-4:] == ("--set", "drafter.gamma=3", "--drafter", "~/dspark/weights")
    assert sent == [str(weights)]
    assert main(["rollout", "--config", "laptop-cpu", *where]) == 0
    assert asked[-1][-2:] == ("--config", "~/dspark/laptop-cpu")
    assert main(["drain", "target-1", *where]) == 0
    assert asked[-1] == ("drain", "target-1", "--cluster", "auto")
    assert main(["rollout", "--drafter", "/no/such/folder", *where]) == 1
    assert "no such folder on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "failed"), [(200, 3), (503, None)])
def test_failed_streams_are_those_of_all_replicas_or_nobody_knows(
    status: int, failed: int | None
) -> None:
    page = 'dspark:num_failed_total{ingress="a"} 2.0\ndspark:num_failed_total{ingress="b"} 1.0\n'
    answer = httpx.Response(status, text=page if failed else "")
    with EndpointClient("http://h/v1", httpx.MockTransport(lambda _: answer)) as client:
        if failed is not None:
            assert client.failed_streams() == failed
            return
        with pytest.raises(CommandError):
            client.failed_streams()
