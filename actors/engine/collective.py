"""What the ranks of a group do together. A collective that does not complete within its bound ends in an error.

All of it is made of one operation, `all_to_all` with exact splits: sums are then taken here, in the order of ranks, and
never in the order in which something arrives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from actors.core.lockstep import CollectiveError, Progress

dist: Any = torch.distributed  # its stores and groups are exported at run time only


class Collective(Protocol):
    """The other ranks, seen from one of them. All ranks must make the same calls in the same order."""

    rank: int
    size: int
    progress: Progress

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first send[0] rows to rank 0 and so on; returns the rows from rank 0, then those from rank 1, …

        rows [sum(send), ...] of any dtype; receive[r] rows come from rank r. Raises CollectiveError.
        """
        ...


def all_gather(collective: Collective, own: Tensor) -> Tensor:
    """`own`, of one shape on all ranks, from every rank: [size, *own.shape]."""
    size = collective.size
    repeated = own[None].expand(size, *own.shape).contiguous()
    return collective.all_to_all(repeated, [1] * size, [1] * size)


def reduce_scatter(collective: Collective, parts: Tensor) -> Tensor:
    """The sum over ranks, in their order, of what each has for this one; parts [size, ...] by destination."""
    size = collective.size
    received = collective.all_to_all(parts, [1] * size, [1] * size)
    total = received[0].clone()
    for rank in range(1, size):
        total += received[rank]
    return total


class DistributedCollective:
    """Over torch.distributed: gloo for CPU tensors, NCCL for those of a GPU.

    Args:
        group: a torch.distributed process group of its own, so that several can live in a process one after the other.
        bound_s: longest a collective may take.
    """

    def __init__(self, group: Any, bound_s: float) -> None:
        self._group = group
        self._bound = timedelta(seconds=bound_s)
        self.rank, self.size = group.rank(), group.size()
        self.progress = Progress(bound_s)

    @classmethod
    def join(
        cls,
        address: str,
        epoch: int,
        rank: int,
        size: int,
        bound_s: float,
        join_within_s: float,
        device: str = "cpu",
        own_host: str = "",
    ) -> DistributedCollective:
        """Meet the other ranks at the store `address` (host:port); raises CollectiveError when one does not come.

        Ranks reach this one at `own_host`; "" leaves the choice to gloo, which asks for the name of this machine.
        """
        host, port = address.rsplit(":", 1)
        patience = timedelta(seconds=join_within_s)
        try:
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=patience, wait_for_workers=False
            )
            meeting = dist.PrefixStore(f"group/{epoch}", store)
            group = _process_group(
                meeting, rank, size, timedelta(seconds=bound_s), device, own_host
            )
            made = cls(group, bound_s)
            # The first collective connects the ranks: nobody is in the group before all are.
            all_gather(made, torch.zeros(1, dtype=torch.int64, device=device))
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(
                f"rank {rank} found not all {size} ranks at {address} within {join_within_s:g} s: {_first_line(error)}"
            ) from error
        return made

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Collective.all_to_all`."""
        assert len(rows) == sum(send), f"{len(rows)} rows, splits {send}"
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        # As bytes: gloo does not carry every dtype.
        given, taken = _bytes(rows.contiguous()), _bytes(out)
        self.progress.enter(time.monotonic())
        try:
            work = self._group.alltoall_base(
                taken, given, list(receive), list(send), dist.AllToAllOptions()
            )
            work.wait(self._bound)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: collective {self.progress.num_collectives} did not complete within "
                f"{self._bound.total_seconds():g} s ({_first_line(error)})"
            ) from error
        self.progress.leave()
        return out


def open_store(host: str) -> tuple[object, str]:
    """A store for ranks to meet at, on a free port of this process, and its address; it lives as long as the object."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def _bytes(rows: Tensor) -> Tensor:
    """The memory of contiguous rows [n, ...] as [n, bytes a row]."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _process_group(
    store: Any, rank: int, size: int, bound: timedelta, device: str, own_host: str
) -> Any:
    if device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = bound
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo
    if not own_host:
        return gloo(store, rank, size, bound)
    options = gloo._Options()
    options._timeout = bound
    options._devices = [gloo.create_device(hostname=own_host)]
    return gloo(store, rank, size, options)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
