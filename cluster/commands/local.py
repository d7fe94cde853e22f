"""A cluster of our own for the length of one command: a child process with its own state file, or of this process."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.commands.signals import interruptible
from cluster.console import CommandError, note
from cluster.run_state import find
from configs.load import load
from configs.schema import ClusterConfig

if TYPE_CHECKING:
    from cluster.launch import LaunchedCluster

START_TIMEOUT_S = 900.0  # the first start fetches and converts the model
STOP_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.2


@contextmanager
def local_cluster(arguments: argparse.Namespace, *overrides: str) -> Iterator[str]:
    """Start `dspark serve` with the command's configuration; yields its endpoint, stops it at the end.

    The child runs in a session of its own, so that Ctrl-C reaches this process alone and the child is always
    ended in order.
    """
    settings = [*arguments.set, *overrides, f"ingress.port={free_port()}"]
    load(arguments.config, settings)  # refuse a bad setting here, in one line
    with tempfile.TemporaryDirectory(prefix="dspark-") as folder:
        state_file = Path(folder) / "running.json"
        command = [sys.executable, "-m", "cluster", "serve", "--end-with-parent"]
        command += ["--state", str(state_file), "--config", arguments.config]
        for setting in settings:
            command += ["--set", setting]
        # The child's stdout is not ours: the last line of ours may be a JSON object.
        with interruptible():
            child = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)
            try:
                yield _await_ready(child, state_file)
            finally:
                _end(child)


@contextmanager
def launched_cluster(config: ClusterConfig) -> Iterator[LaunchedCluster]:
    """Start a cluster from this process, so that its actors can be asked directly; it ends with the block.

    Raises:
        CommandError: it could not start.
    """
    from cluster import launch as launcher  # imports Ray

    with interruptible():
        try:
            yield launcher.launch(config, progress=note)
        except launcher.LaunchError as error:
            raise CommandError(str(error)) from error
        finally:
            note("stopping the cluster")
            launcher.shutdown()


def _await_ready(child: subprocess.Popen[bytes], state_file: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        state = find(state_file)
        if state is not None and state.phase == "ready":
            return state.endpoint
        if child.poll() is not None:
            raise CommandError("the cluster did not start; its own message stands above")
        time.sleep(POLL_INTERVAL_S)
    raise CommandError(f"the cluster was not ready within {START_TIMEOUT_S:g} s")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
