"""The machine a cluster is operated from: it has the repository, a key, the launcher file, and runs `dspark`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import ENVIRONMENT, REPOSITORY, Network

TEMPLATE = REPOSITORY / "configs" / "ray_up" / "onprem.yaml"
COMMAND_TIMEOUT_S = 400.0


class OperatorError(RuntimeError):
    """A command failed."""


class Operator:
    """Runs `dspark` as a user would, in the repository, with a home of its own.

    Args:
        folder: for its home and files.
        network: the hosts; the first is the head.
        logs: where every command's output is kept.
    """

    def __init__(self, folder: Path, network: Network, logs: Path) -> None:
        self.folder, self.logs = folder, logs
        self._home = folder / "home"
        self._home.mkdir(parents=True)
        self._num_commands = 0
        self.file = folder / "cluster.yaml"
        self._write_launcher_file(network)

    def _write_launcher_file(self, network: Network) -> None:
        """Ours, edited as its comments ask."""
        values = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
        head, *workers = (host.address for host in network.hosts.values())
        values["provider"] |= {"head_ip": head, "worker_ips": workers}
        values["auth"] = {"ssh_user": "root", "ssh_private_key": str(network.key)}
        setup = self.folder / "dist"  # without a wheel: the hosts find an environment in place
        setup.mkdir()
        for name in ("configs/ray_up/setup_node.sh", "configs/ray_up/node.sh", "constraints.txt"):
            shutil.copy(REPOSITORY / name, setup)
        values["file_mounts"]["~/dspark/setup"] = str(setup)
        self.file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def dspark(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, Any]:
        """The object that `dspark … --json` ends with."""
        self._num_commands += 1
        log = self.logs / f"{self._num_commands:02d}-{arguments[0]}.log"
        command = [sys.executable, "-m", "cluster", *arguments, "--json"]
        with log.open("wb") as said:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                env=self._environment,
                cwd=REPOSITORY,
                timeout=timeout_s,
                check=False,
            )
        lines = done.stdout.decode().strip().splitlines() or ["{}"]
        answer: dict[str, Any] = json.loads(lines[-1])
        if "error" in answer or (done.returncode and arguments[0] != "status"):
            tail = log.read_text(errors="replace")[-3000:]
            raise OperatorError(f"dspark {' '.join(arguments)}: {answer.get('error')}\n{tail}")
        return answer

    def on_cluster(self, command: str, *arguments: str) -> dict[str, Any]:
        return self.dspark(command, "--cluster", str(self.file), *arguments)

    def until(self, what: str, condition: Any, within_s: float) -> Any:
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise OperatorError(f"not within {within_s:g} s: {what}")
            time.sleep(0.5)
        return value

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"HOME": str(self._home), "PATH": path}
