"""Start-up says what is wrong, and nothing is left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import launch as launcher
from cluster import members
from tests import ray_fakes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MARK = "DSPARK_TEST_MARK"  # every process of one launch inherits it
EXIT_WITHIN_S = 45.0
STARTS_WITHIN_S = 90.0


def marked(mark: str) -> list[str]:
    """The processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Served:
    """A launch in a process of its own."""

    def __init__(self, home: Path, *arguments: str, **variables: str) -> None:
        self.mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self.mark, "HOME": str(home), "RAY_TMPDIR": str(home)}
        environment |= variables
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve_fakes", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # a signal reaches the driver alone, as from `kill`
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"{text!r} never came: {self.lines}")

    def polite_actors(self) -> list[str]:
        """Actors that yield the processor to the process that started them."""
        driver = psutil.Process(self.process.pid)
        children = driver.children(recursive=True)
        actors = [one for one in children if " ".join(one.cmdline()).startswith("ray::")]
        assert actors
        return [" ".join(one.cmdline()) for one in actors if one.nice() > driver.nice()]

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.wait(EXIT_WITHIN_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def serve(private_home: Path, make_config: Any) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*address: str, **variables: str) -> Served:
        settings = make_config().model_dump_json()
        started.append(Served(private_home, settings, *address, **variables))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.mark.timeout(STARTS_WITHIN_S + EXIT_WITHIN_S)
def test_a_signal_ends_a_serving_cluster_without_a_process_left(
    serve: Callable[..., Served],
) -> None:
    served = serve(LEAVE_AN_ORPHAN="1")
    served.read_until("serving")
    assert any("sleep 600" in process for process in marked(served.mark))
    polite = served.polite_actors()
    served.end(signal.SIGINT)
    assert polite == [], "any busy program beside them starves them"
    assert "ended" in served.lines
    assert marked(served.mark) == []
    assert served.process.returncode == 0


@pytest.mark.timeout(STARTS_WITHIN_S + EXIT_WITHIN_S)
@pytest.mark.parametrize("moment", [2.5, "Ray is up", "target-0"])
def test_a_signal_during_start_up_leaves_no_process_behind(
    serve: Callable[..., Served], moment: float | str
) -> None:
    served = serve()
    if isinstance(moment, str):
        served.read_until(moment)
    else:
        time.sleep(moment)
    served.end(signal.SIGTERM if moment == "target-0" else signal.SIGINT)
    assert served.process.returncode != 0
    assert marked(served.mark) == []


@pytest.mark.timeout(STARTS_WITHIN_S + EXIT_WITHIN_S)
def test_a_driver_that_is_killed_takes_the_cluster_with_it(serve: Callable[..., Served]) -> None:
    served = serve()
    served.read_until("serving")
    served.process.kill()
    deadline = time.monotonic() + EXIT_WITHIN_S
    while left := marked(served.mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_cluster_joins_a_running_ray_and_leaves_it_running(
    serve: Callable[..., Served], local_ray: None
) -> None:
    import ray

    served = serve(ray.get_runtime_context().gcs_address)
    served.read_until("serving")
    assert ray.get_actor("target-0", namespace=launcher.NAMESPACE)
    served.end(signal.SIGTERM)
    assert served.process.returncode == 0 and "ended" in served.lines
    assert marked(served.mark) == []
    with pytest.raises(ValueError, match="target-0"):
        ray.get_actor("target-0", namespace=launcher.NAMESPACE)
    assert ray.cluster_resources()["CPU"] == 4


# --- failures that a user can mend ------------------------------------------------------------------------------------


def no_weights(config: Any, seat: Any) -> Any:
    raise FileNotFoundError("model.safetensors is not there")


def launch_with(config: Any, **parts: Any) -> None:
    from dataclasses import replace

    from tests.ray_local.conftest import FAKE_PARTS

    launcher.launch(config, parts=replace(FAKE_PARTS, **parts))


@pytest.fixture
def after(local_ray: None) -> Iterator[None]:
    yield
    launcher.shutdown()


def test_an_engine_that_cannot_load_is_named_with_its_cause(after: None, make_config: Any) -> None:
    with pytest.raises(launcher.LaunchError, match=r"drafter-0.*FileNotFoundError: model.safetens"):
        launch_with(make_config(), drafter_engine=no_weights)


def test_too_many_ranks_for_the_machines_are_refused_with_the_numbers(
    after: None, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "PLACEMENT_TIMEOUT_S", 1.0)
    with pytest.raises(launcher.LaunchError, match=r"no room.*160.*target\.num_ranks"):
        launch_with(make_config(40, 40, drafter={"num_actors": 40, "num_cpus": 3.75}))


def test_an_ingress_that_does_not_come_up_is_a_launch_error_and_needs_a_shutdown(
    after: None, make_config: Any
) -> None:
    def run_ingress(_config: Any) -> str:
        raise RuntimeError("port 8000 is taken")

    with pytest.raises(launcher.LaunchError, match="ingress: port 8000 is taken"):
        launch_with(make_config(), run_ingress=run_ingress)
    with pytest.raises(launcher.LaunchError, match="already running"):
        launch_with(make_config())


def test_shutdown_without_a_launch_does_nothing(local_ray: None) -> None:
    launcher.shutdown()
    launcher.shutdown()


def test_without_a_drafter_the_cluster_decodes_plainly(
    start_cluster: Any, make_config: Any, open_client: Any
) -> None:
    config = make_config(
        model={"name": "fake", "dtype": "float32", "max_model_len": 1024, "drafter": None}
    )
    cluster = start_cluster(config)
    client = open_client(cluster)
    client.submit("r", [5, 6, 7], 50)
    client.finish("r")
    assert client.tokens("r") == ray_fakes.stream_after([5, 6, 7], 50)
    assert client.deltas["r"][-1].num_scheduled == 0
