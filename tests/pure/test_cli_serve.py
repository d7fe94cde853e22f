"""`dspark serve`, `stop`, `status` around a stand-in for the launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster
from cluster.cli import main
from cluster.run_state import RunState, find, register

STATE = RunState(
    pid=os.getpid(),
    phase="ready",
    endpoint="http://127.0.0.1:9/v1",
    model="m",
    numerics="fast",
    started_at_s=0.0,
)


class FakeLauncher:
    """Stands in for `cluster.launch`: remembers what was asked of it."""

    class LaunchError(Exception):
        pass

    def __init__(self, during_launch: Callable[[], None] = lambda: None) -> None:
        self.calls: list[str] = []
        self._during_launch = during_launch

    def launch(self, config: Any, progress: Callable[[str], None]) -> SimpleNamespace:
        self.calls.append("launch")
        progress("target-0 ready")
        print("a library prints something")  # noqa: T201
        self._during_launch()
        return SimpleNamespace(
            endpoint_url=f"http://127.0.0.1:{config.ingress.port}/v1", ray_address="1.2.3.4:5"
        )

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "running.json"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeLauncher], FakeLauncher]:
    def put(launcher: FakeLauncher) -> FakeLauncher:
        monkeypatch.setattr(cluster, "launch", launcher, raising=False)
        monkeypatch.setitem(sys.modules, "cluster.launch", launcher)
        return launcher

    return put


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def serve(state_file: Path, *extra: str) -> int:
    port = free_port()
    return main(["serve", "--state", str(state_file), "--set", f"ingress.port={port}", *extra])


def when_ready(state_file: Path, act: Callable[[RunState], None]) -> threading.Thread:
    def wait() -> None:
        while (state := find(state_file)) is None or state.phase != "ready":
            time.sleep(0.01)
        act(state)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_says_where_it_listens_and_ends_in_order_on_a_signal(
    number: signal.Signals,
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = install(FakeLauncher())
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen: list[RunState] = []

    def act(state: RunState) -> None:
        seen.append(state)
        os.kill(os.getpid(), number)

    watcher = when_ready(state_file, act)
    assert serve(state_file, "--json") == 0
    watcher.join()
    assert launcher.calls == ["launch", "shutdown"]
    assert seen[0].pid == os.getpid()
    assert seen[0].ray_address == "1.2.3.4:5"
    assert not state_file.exists()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    printed = capsys.readouterr()
    assert json.loads(printed.out)["endpoint"] == seen[0].endpoint  # and nothing else
    assert "target-0 ready" in printed.err
    assert "a library prints something" in printed.err


def test_an_interrupt_while_starting_still_shuts_down(
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = install(FakeLauncher(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert serve(state_file) == 130
    assert launcher.calls == ["launch", "shutdown"]
    assert not state_file.exists()
    assert "interrupted while starting" in capsys.readouterr().err


def test_a_failed_start_is_one_line_and_shuts_down(
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise FakeLauncher.LaunchError("model.path = 'x': no such folder; see configs/models")

    launcher = install(FakeLauncher(fail))
    assert serve(state_file, "--json") == 1
    assert launcher.calls == ["launch", "shutdown"]
    printed = capsys.readouterr()
    assert "dspark: model.path = 'x'" in printed.err
    assert "no such folder" in json.loads(printed.out)["error"]


def test_a_port_in_use_is_refused_with_another_to_choose(
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = install(FakeLauncher())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["serve", "--state", str(state_file), "--set", f"ingress.port={port}"])
    assert code == 1
    assert launcher.calls == []
    assert f"--set ingress.port={port + 1}" in capsys.readouterr().err


def test_a_second_cluster_is_refused(
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher = install(FakeLauncher())
    with register(state_file, STATE):
        assert serve(state_file) == 1
    assert launcher.calls == []
    assert "already running at http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_a_cluster_started_for_a_command_ends_with_it(
    state_file: Path,
    install: Callable[[FakeLauncher], FakeLauncher],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = install(FakeLauncher())
    parents = iter([100, 100])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    assert serve(state_file, "--end-with-parent") == 0
    assert launcher.calls == ["launch", "shutdown"]


def test_the_state_is_only_believed_while_its_process_lives(state_file: Path) -> None:
    code = (
        "import sys, pathlib, os\n"
        "from cluster.run_state import RunState, register\n"
        "state = RunState(os.getpid(), 'ready', 'u', 'm', 'fast', 0.0)\n"
        "with register(pathlib.Path(sys.argv[1]), state):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(state_file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        found = find(state_file)
        assert found is not None
        assert found.pid == holder.pid
        holder.kill()
        holder.wait()
    assert state_file.exists()  # killed: nobody tidied up
    assert find(state_file) is None
    with register(state_file, STATE):  # and the next cluster may start
        assert find(state_file) == STATE


@pytest.mark.parametrize("text", ["", "{", "{}", '{"pid": 1}', "[]"])
def test_a_state_of_another_version_is_not_used(text: str, state_file: Path) -> None:
    with register(state_file, STATE):
        state_file.write_text(text)
        assert find(state_file) is None


def test_stop_ends_the_process_and_waits(
    state_file: Path, install: Callable[[FakeLauncher], FakeLauncher]
) -> None:
    install(FakeLauncher())
    codes: list[int] = []
    stopper = when_ready(
        state_file, lambda _: codes.append(main(["stop", "--state", str(state_file), "--json"]))
    )
    assert serve(state_file) == 0
    stopper.join(10)
    assert codes == [0]


def test_stop_says_when_a_process_does_not_end(
    state_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: None)
    with register(state_file, STATE):
        assert main(["stop", "--state", str(state_file), "--timeout", "0.2"]) == 1
    assert f"kill -KILL {STATE.pid}" in capsys.readouterr().err


def test_without_a_cluster_stop_is_done_and_status_fails(
    state_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "--state", str(state_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False}
    assert main(["status", "--state", str(state_file), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"running": False}
    assert "start one with `dspark serve`" in printed.err
    assert main(["chat", "--state", str(state_file)]) == 1
    assert "start one with `dspark serve`" in capsys.readouterr().err
