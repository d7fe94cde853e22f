"""Which cluster is running here: one small locked file, written by `dspark serve` and read by every other command.

`serve` holds an exclusive lock on the file for as long as it lives. The kernel drops the lock with the process, so a
file whose lock can be had is stale, whatever its pid field says.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

DEFAULT_STATE_FILE = Path("~/.cache/dspark-cluster/running.json")
RECORD_BYTES = 4096
READER_RETRIES, READER_PAUSE_S = 20, 0.02


@dataclass(frozen=True)
class RunState:
    """What others need to reach a running cluster."""

    pid: int
    phase: Literal["starting", "ready", "stopping"]
    endpoint: str  # http://host:port/v1
    model: str
    numerics: str
    started_at_s: float  # seconds since the epoch
    ray_address: str = ""


class AlreadyRunningError(RuntimeError):
    """Another `serve` holds the state file."""

    def __init__(self, state: RunState | None) -> None:
        self.state = state
        where = f" at {state.endpoint} (pid {state.pid})" if state else ""
        super().__init__(f"a cluster is already running{where}; end it with `dspark stop`")


class Registration:
    """The right to be the running cluster, held by `serve`."""

    def __init__(self, file: IO[str], state: RunState) -> None:
        self._file = file
        self.state = state
        self._write()

    def update(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._write()

    def _write(self) -> None:
        # One write of a constant length: a reader sees the old state or the new one, never half of it.
        text = json.dumps(asdict(self.state)).encode().ljust(RECORD_BYTES)
        assert len(text) == RECORD_BYTES
        os.pwrite(self._file.fileno(), text, 0)


@contextmanager
def register(path: Path, state: RunState) -> Iterator[Registration]:
    """Hold the state file for the duration of the block; remove it at the end.

    Raises:
        AlreadyRunningError: another process holds it.
    """
    file = _lock(path)
    for _ in range(READER_RETRIES):  # a reader holds the lock for a moment while it looks
        if file is not None or find(path) is not None:
            break
        time.sleep(READER_PAUSE_S)
        file = _lock(path)
    if file is None:
        raise AlreadyRunningError(find(path))
    try:
        yield Registration(file, state)
    finally:
        path.expanduser().unlink(missing_ok=True)
        file.close()


def find(path: Path) -> RunState | None:
    """The cluster that is running now, or None. A stale file counts as none."""
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            if _try_lock(file, fcntl.LOCK_SH):
                return None
            return _parse(file.read())
    except FileNotFoundError:
        return None


def _parse(text: str) -> RunState | None:
    try:
        return RunState(**json.loads(text))
    except (ValueError, TypeError):  # written by another version
        return None


def _lock(path: Path) -> IO[str] | None:
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
        if not _try_lock(file, fcntl.LOCK_EX):
            file.close()
            return None
        if _is_current(file, path):
            return file
        file.close()  # its owner removed the file between our open and our lock


def _is_current(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
