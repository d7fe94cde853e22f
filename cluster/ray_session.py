"""Starting, joining and leaving Ray, so that nothing of it is left behind."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

log = logging.getLogger(__name__)

TOKEN_FILE = Path(".ray") / "auth_token"
MARK = "DSPARK_SESSION"
EXIT_GRACE_S = 4.0  # before an end is asked for, and again before it is forced


class RaySessionError(RuntimeError):
    """Ray could not be started or joined; the message says what to do."""


class RaySession:
    """A Ray that this process starts, joins, or already has; in the last two cases it outlives us.

    A process whose parent has ended no longer shows whom it belonged to. Two things find it all the same: what was seen
    below this process while the session lives is remembered, and all of them inherit a mark in their environment
    (which those that rewrite their title lose).

    Args:
        address: "host:port" of a running cluster; None starts one here.
        namespace: for named actors.
    """

    def __init__(self, address: str | None, namespace: str) -> None:
        self._address = address
        self._namespace = namespace
        self._strangers = set(psutil.Process().children(recursive=True))
        self._processes: set[psutil.Process] = set()
        self._was_there = ray.is_initialized()
        self._mark = uuid.uuid4().hex

    @property
    def is_local(self) -> bool:
        """Whether all of it runs on this machine, for us alone."""
        return self._address is None and not self._was_there

    def open(self, num_cpus: float) -> None:
        """Start Ray or join it.

        Call it on the main thread: the processes of a local Ray end with the thread that started them.

        Args:
            num_cpus: CPUs that the actors reserve. They are a weight, not a limit, so a local Ray offers as many.

        Raises:
            RaySessionError: with the remedy.
        """
        if self._was_there:
            return
        _log_what_ray_prints()
        os.environ[MARK] = self._mark
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # A busy machine needs longer than Ray's default for the agents of its node to come up.
        os.environ.setdefault("RAY_agent_register_timeout_ms", "120000")
        # By default Ray's workers yield (nice 15) to any other program: a client beside them would starve the ranks.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            if self._address is not None:
                # A local start turns token authentication on by itself, joining by address does not.
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
                ray.init(
                    address=self._address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,  # where an error of ours is one line
                )
                return
            ray.init(
                address="local",  # never a stale cluster that some file still names
                namespace=self._namespace,
                num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # a node that is slow to start raises nothing more special
            raise RaySessionError(f"{self._what}: {error}; {self._remedy}") from error
        _hide_token()

    @property
    def address(self) -> str:
        return str(ray.get_runtime_context().gcs_address)

    @property
    def node_address(self) -> str:
        """Of the node this process runs on."""
        return str(ray.util.get_node_ip_address())

    def shape(self) -> tuple[int, int]:
        """Cores of the smallest node that offers any, and the number of such nodes."""
        offered = (node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        cores = [int(num_cpus) for num_cpus in offered if num_cpus]
        return max(1, min(cores, default=1)), max(1, len(cores))

    def remember_processes(self) -> None:
        if self.is_local:
            self._processes |= set(psutil.Process().children(recursive=True)) - self._strangers

    def _marked_processes(self) -> set[psutil.Process]:
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(MARK) == self._mark:
                    found.add(process)
        return found

    def close(self) -> None:
        """Leave Ray; when it is ours, end it and wait until its last process has gone."""
        if self._was_there:
            return
        self.remember_processes()
        ray.shutdown()
        os.environ.pop(MARK, None)
        if not self.is_local:
            return
        self.remember_processes()
        self._processes |= self._marked_processes()
        _, alive = psutil.wait_procs(self._processes, timeout=EXIT_GRACE_S)
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in alive:
                log.warning("process %d (%s) did not end by itself", process.pid, _name(process))
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
            _, alive = psutil.wait_procs(alive, timeout=EXIT_GRACE_S)

    @property
    def _what(self) -> str:
        return f"address={self._address!r}" if self._address else "a local Ray could not start"

    @property
    def _remedy(self) -> str:
        if self._address:
            return (
                "check the address, and that RAY_AUTH_MODE and ~/.ray/auth_token are the cluster's"
            )
        return "look at free memory and at the logs below RAY_TMPDIR (by default /tmp/ray)"


def _log_what_ray_prints() -> None:
    """Ray prints messages of its nodes to stdout, where ours may be read by a machine: they go to the log instead."""

    def to_log(data: dict[str, Any], *_: Any, **__: Any) -> None:
        for line in data["lines"]:
            # Serve's controller leaves calls behind whenever it ends.
            level = logging.INFO if "Task ServeController." in line else logging.WARNING
            log.log(level, "Ray: %s", line.rstrip())

    ray._private.worker.print_to_stdstream = to_log


def log_folder() -> str:
    """Where the actors' own output lies."""
    node: Any = ray._private.worker.global_worker.node
    return str(node.get_logs_dir_path()) if node is not None else "the logs of Ray"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return "gone"


def _hide_token() -> None:
    """Ray writes its token readable for everybody on this machine."""
    token = Path.home() / TOKEN_FILE
    with contextlib.suppress(OSError):
        if token.is_file() and token.stat().st_mode & 0o077:
            token.chmod(0o600)
