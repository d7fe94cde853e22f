"""Measured cells on disk, one JSON object a line, so that a run that was broken off can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.console import CommandError

FILE = "cells.jsonl"


def identity_of(facts: Mapping[str, Any]) -> str:
    """A short name of everything that must be equal for two cells to be comparable."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Ledger:
    """The cells of one identity.

    Args:
        folder: where `cells.jsonl` lies; None keeps nothing.
        identity: rows of another one are left alone, and not used.
        resume: go on with what is there; else a folder with cells is refused.

    Raises:
        CommandError: the folder holds cells and `resume` was not asked for, or it cannot be written.
    """

    def __init__(self, folder: Path | None, identity: str, *, resume: bool) -> None:
        self._identity = identity
        self._path = folder / FILE if folder else None
        self.rows: dict[str, dict[str, Any]] = {}
        self.num_foreign = 0
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_bytes() if self._path.exists() else b""
            if lines and not resume:
                raise CommandError(
                    f"{self._path} holds measured cells: continue with --resume, or name another folder",
                    exit_code=2,
                )
            self._load(lines)
        except OSError as error:
            raise CommandError(f"--out {folder}: {error}") from error

    def _load(self, data: bytes) -> None:
        whole, end, torn = data.rpartition(b"\n")
        if torn:  # the process was ended while it wrote: that cell is measured again
            assert self._path is not None
            os.truncate(self._path, len(whole) + len(end))
        for line in whole.splitlines():
            row = json.loads(line)
            if row["identity"] != self._identity:
                self.num_foreign += 1
            elif not row["num_errors"]:
                self.rows[row["key"]] = row

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Keep a cell; it is on the disk when this returns."""
        kept = {"identity": self._identity, "key": key, **row}
        self.rows[key] = kept
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(json.dumps(kept).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
