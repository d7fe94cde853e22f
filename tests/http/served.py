"""A server in another process, for tests of the real Serve application."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """One that Ray will not take in the meantime: it uses ephemeral ports, and 10002 to 19999."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


class ServeProcess:
    """A process that serves, with a Ray and a home of its own; it takes commands line by line."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.home = home = Path(
            tempfile.mkdtemp(prefix="ds", dir="/tmp")
        )  # short: a limit on socket paths
        self.port = free_port()
        self.proxy = ""  # of a test that tells them apart
        self.log = (home / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(self.port), *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "HOME": str(home),
                "RAY_TMPDIR": str(home),
                "RAY_AUTH_MODE": "token",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        ready = self._line()
        assert ready.startswith("READY"), ready + (home / "log").read_text()[-3000:]
        self.url = ready.split()[1]

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, "it did not happen in time"
            time.sleep(0.02)

    def quit(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None and not self.process.stdin.closed:
            with suppress(BrokenPipeError):
                self.ask("quit")
        self.process.wait(60)
        self.log.close()
        self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def _line(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):  # Ray prints there too
                return line.removeprefix("> ").strip()
        return ""
