"""A drafter in a process of its own, as it is served: commits in, blocks out, one engine for each block length."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from actors.core.messages import CommitBatch, ProposalBatch
from actors.engine.base import DrafterEngine
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.checkpoint import load_drafter
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import engine_for
from actors.engine.weights import embedding_tables

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0


class Drafted(NamedTuple):
    """What came back, and the processor seconds of all threads it took there."""

    proposals: ProposalBatch
    processor_s: float


class DrafterProcess:
    """Serves the drafter in `drafter_dir` with blocks of each of `gammas`; use it as a context manager.

    It computes with as many threads as this process: rank and drafter take turns, so both have all cores (see
    `cluster.placement.plan_threads`).
    """

    def __init__(
        self,
        drafter_dir: Path,
        target_dir: Path,
        gammas: Sequence[int],
        dtype: torch.dtype,
        tables: ConfidenceTables | None = None,
    ) -> None:
        # A fork would inherit torch's threads, and not start them.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        given = (
            *(theirs, drafter_dir, target_dir, tuple(gammas), dtype),
            *(torch.get_num_threads(), tables),
        )
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()  # so that its death is seen here

    def __enter__(self) -> DrafterProcess:
        if not self._connection.poll(START_TIMEOUT_S):
            self._end()
            raise RuntimeError(f"the drafter's process did not start within {START_TIMEOUT_S:g} s")
        self._receive()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._end()

    def advance(self, gamma: int, commits: CommitBatch) -> Drafted:
        """Return the blocks of `gamma` tokens for these commits; RuntimeError when the process has died."""
        self._connection.send((gamma, commits))
        drafted = self._receive()
        assert isinstance(drafted, Drafted)
        return drafted

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError as error:
            self._process.join(STOP_TIMEOUT_S)
            raise RuntimeError(
                f"the drafter's process ended with exit code {self._process.exitcode}; see its message above"
            ) from error

    def _end(self) -> None:
        self._connection.close()  # it ends when nobody is left to send
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def engine_of_length(
    model: DraftModel, gamma: int, dtype: torch.dtype, tables: ConfidenceTables | None = None
) -> DrafterEngine:
    """Serve the model with blocks of `gamma`, whatever it was trained with: only their cost is asked for.

    Slots beyond those that `tables` were fitted for are calibrated as the last of these.
    """
    own = model.config
    model.config = replace(own, block_size=gamma)
    try:
        options = DrafterOptions("measure", dtype=dtype)
        own_tables = tables or ConfidenceTables.identity(gamma)
        return engine_for(model, own_tables.reaching(gamma), options, "measure")
    finally:
        model.config = own  # the engine has its own copy, with the other length


def _serve(
    connection: Connection,
    drafter_dir: Path,
    target_dir: Path,
    gammas: tuple[int, ...],
    dtype: torch.dtype,
    num_threads: int,
    tables: ConfidenceTables | None,
) -> None:
    torch.set_num_threads(num_threads)
    model = load_drafter(drafter_dir, *embedding_tables(target_dir, dtype))
    engines = {gamma: engine_of_length(model, gamma, dtype, tables) for gamma in gammas}
    connection.send("ready")
    while True:
        try:
            gamma, commits = connection.recv()
        except EOFError:
            return
        started = time.process_time()
        proposals = engines[gamma].advance(commits)
        assert proposals is not None  # every row wants a block
        connection.send(Drafted(proposals, time.process_time() - started))
