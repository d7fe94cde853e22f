"""The ranks of a group as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from actors.core.lockstep import CollectiveError, Progress

T = TypeVar("T")
BOUND_S = 60.0


class Board:
    """Where the threads of one group lay down what they send."""

    def __init__(self, size: int, bound_s: float = BOUND_S) -> None:
        self.size, self.bound_s = size, bound_s
        self.barrier = threading.Barrier(size)
        self.sent: list[list[Tensor]] = [[] for _ in range(size)]
        self.calls: list[tuple[tuple[int, ...], ...]] = []  # send splits of all ranks, by call

    def collectives(self) -> list[ThreadCollective]:
        return [ThreadCollective(self, rank) for rank in range(self.size)]


class ThreadCollective:
    """Implements `Collective`."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size = board, rank, board.size
        self.progress = Progress(board.bound_s)

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        assert len(rows) == sum(send)
        board = self.board
        self.progress.enter(time.monotonic())
        board.sent[self.rank] = [part.clone() for part in rows.split(list(send))]
        self._meet()
        parts = [of[self.rank] for of in board.sent]
        if self.rank == 0:
            board.calls.append(tuple(tuple(map(len, of)) for of in board.sent))
        assert [len(part) for part in parts] == list(receive), "splits do not fit"
        self._meet()
        self.progress.leave()
        return torch.cat(parts)

    def _meet(self) -> None:
        try:
            self.board.barrier.wait(self.board.bound_s)
        except threading.BrokenBarrierError:
            raise CollectiveError(f"rank {self.rank}: a thread did not come") from None


def on_ranks(
    size: int, work: Callable[[ThreadCollective], T], bound_s: float = BOUND_S
) -> tuple[list[T], Board]:
    """`work` of every rank, each in a thread of its own; a rank that raises frees the others."""
    board = Board(size, bound_s)

    def run(collective: ThreadCollective) -> T:
        torch.set_num_threads(1)
        try:
            return work(collective)
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, collective) for collective in board.collectives()]
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, CollectiveError)]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures], board
