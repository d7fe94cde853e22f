"""Several trainers that make one step together: each takes its part of a step's answers, gradients are summed.

What a step draws depends on (seed, step) alone and every trainer draws all of it, so that N trainers make the steps
that one trainer makes with the same answers, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from actors.engine.collective import Collective, all_gather, reduce_scatter

T = TypeVar("T")


class Peers:
    """The trainers of a run, seen from one of them. All must make the same calls in the same order."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.rank, self.size = collective.rank, collective.size

    def part(self, drawn: Sequence[T]) -> list[T]:
        """Return what this trainer computes of a step; ValueError when there is not one for each."""
        if len(drawn) < self.size:
            raise ValueError(
                f"{len(drawn)} answers a step for {self.size} trainers; give --sequences one for each"
            )
        return list(drawn[self.rank :: self.size])

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of `own` [n] over all trainers, in their order: the same bits on each of them."""
        width = -(-len(own) // self.size)
        padded = own.new_zeros(width * self.size)
        padded[: len(own)] = own
        part = reduce_scatter(self.collective, padded.view(self.size, width))
        return all_gather(self.collective, part).flatten()[: len(own)]

    def add_gradients(self, model: nn.Module, facts: Tensor) -> Tensor:
        """Replace every gradient by its sum over the trainers; returns the sum of `facts` [n] in the same message."""
        trained = [p for p in model.parameters() if p.requires_grad]
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        total = self.sum(torch.cat([facts, *(g.flatten().float() for g in own)]))
        at = len(facts)
        for parameter in trained:
            size = parameter.numel()
            parameter.grad = total[at : at + size].view_as(parameter).to(parameter.dtype)
            at += size
        return total[: len(facts)]

    def share(self, model: nn.Module) -> None:
        """Give every trainer the parameters of the first one."""
        with torch.no_grad():
            for parameter in model.parameters():
                own = parameter if self.rank == 0 else torch.zeros_like(parameter)
                parameter.copy_(self.sum(own.flatten().float()).view_as(parameter))
