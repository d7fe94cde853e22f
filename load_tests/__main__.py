"""`make load`: a short Locust run against a cluster of its own, or with `--url` against any OpenAI-compatible server.

    python -m load_tests [--url http://HOST:PORT] [--config PRESET] [Locust and locustfile options]

Without `--url` it starts `dspark serve` on a free port (the command is found beside the checkout's environment, or by
`--dspark`), waits until it is ready and stops it afterwards. Exit status: Locust's, so `--check` decides.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from load_tests.endpoint import root_of

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 90.0
DRAIN_S = "120"  # Locust lets running streams end before it stops


class ServerError(RuntimeError):
    """The cluster under load did not start."""


@contextmanager
def served(dspark: Path, config: str, settings: list[str]) -> Iterator[str]:
    """Run `dspark serve` for the length of the block; yields http://host:port.

    Raises:
        ServerError: it ended, or was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-load-") as folder:
        command = [str(dspark), "serve", "--json", "--end-with-parent", "--config", config]
        command += ["--state", str(Path(folder) / "running.json")]
        for setting in (*settings, f"ingress.port={_free_port()}"):
            command += ["--set", setting]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            assert child.stdout is not None
            # One JSON object once it is ready; end of file if it dies.
            is_there, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
            if not is_there:
                raise ServerError(f"the cluster was not ready within {START_TIMEOUT_S:g} s")
            line = child.stdout.readline()
            if not line:
                raise ServerError("the cluster did not start; its own message stands above")
            yield root_of(str(json.loads(line)["endpoint"]))
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def drive(url: str, options: list[str]) -> int:
    """Run Locust headless against `url`; returns its exit status."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "load_tests" / "locustfile.py")]
    command += ["--headless", "--only-summary", "--host", url, "--stop-timeout", DRAIN_S, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Read the options, start what is needed, drive it."""
    parser = argparse.ArgumentParser(prog="python -m load_tests", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", help="server under load, without /v1; default: start one")
    parser.add_argument(
        "--config", default="laptop-cpu", help="preset or file of the started cluster"
    )
    parser.add_argument("--set", action="append", default=[], help="setting of the started cluster")
    parser.add_argument("--dspark", type=Path, default=ROOT / ".venv" / "bin" / "dspark")
    arguments, options = parser.parse_known_args()
    if arguments.url:
        return drive(root_of(arguments.url), options)
    if not arguments.dspark.exists():
        print(f"{arguments.dspark} is missing: run `make setup`, or give --url", file=sys.stderr)
        return 2
    try:
        with served(arguments.dspark, arguments.config, arguments.set) as url:
            return drive(url, options)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
