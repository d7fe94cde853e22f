"""Turning a forward over fixed buffers into something that is replayed instead of launched operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded(Generic[T]):
    """A captured forward: `replay` computes `outputs` anew, in place, from the buffers it was captured with."""

    replay: Callable[[], None]
    outputs: T


class Recorder(Protocol):
    """Turns a function into something that can be replayed."""

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        """Raises RuntimeError when `run` cannot be captured."""
        ...

    def forget(self) -> None:
        """What was recorded so far is not replayed again."""
        ...


class CudaGraphRecorder:
    """Captures CUDA graphs that share one memory pool: outputs are read before the next replay."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        """Run twice on a side stream (kernels compile, libraries allocate), then capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        self._pool = graph.pool()
        return Recorded(graph.replay, outputs)

    def forget(self) -> None:
        """Let the pool go: one whose graphs are all gone cannot be captured into."""
        self._pool = None
