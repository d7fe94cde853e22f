"""A CUDA graph's rules on a CPU: operations are written down with their tensors and replayed without any Python.

What a graph freezes is frozen here too: sizes, Python numbers, choices, and the addresses of tensors. What a capture
forbids is refused: reading a tensor's contents. A kernel of ours, chosen by `kernels.dispatch`, is one operation, as a
launch is; its torch twin may do inside what it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from actors.engine.graphs import Recorded
from kernels import dispatch

T = TypeVar("T")
aten = torch.ops.aten
# Results whose size or value the host must learn.
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.bincount.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_masked = func in INDEXED and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if func in READS or is_masked:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        return self.note(func, args, kwargs or {})

    def note(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        with _disable_current_modes():
            result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                # A view and what was written in place are the old tensor again.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """Implements `Recorder`."""

    def __init__(self) -> None:
        self.num_records = 0
        self._tape: _Tape | None = None

    def record(self, run: Callable[[], T]) -> Recorded[T]:
        self.num_records += 1
        run()
        tape = self._tape = _Tape()
        try:
            with tape:
                outputs = run()
        finally:
            self._tape = None

        def replay() -> None:
            # Whatever still holds from the capture shows: only a replay may compute it.
            for output in tree_flatten(outputs)[0]:
                if isinstance(output, Tensor):
                    output.fill_(-77)
            tape.replay()

        return Recorded(replay, outputs)

    def forget(self) -> None:
        pass

    @contextmanager
    def watched_kernels(self) -> Iterator[None]:
        """Kernels of ours called while recording become one operation each."""
        chosen = dispatch.chosen

        def watched(op: dispatch.Op, device_type: str) -> Callable[..., Any]:
            function = chosen(op, device_type)
            tape = self._tape
            if tape is None:
                return function
            return lambda *args, **kwargs: tape.note(function, args, kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "chosen", watched)
            yield
