"""The sparse feed-forward layer of Qwen3-MoE and Mixtral: softmax routing to the k most probable experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from actors.engine.packed_linear import GatedMlp, Linear
from kernels import dispatch
from kernels.grouped_gemm import grouped_apply

Stage = Literal[
    "attention", "dispatch", "experts", "combine"
]  # of a layer; attention: all before its experts


class ExpertBank(Protocol):
    """Experts that lie on one device, whatever they are made of."""

    @property
    def num_experts(self) -> int: ...

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Expert e applied to its counts[e] rows; rows [n, hidden] are sorted by expert. Returns [n, hidden]."""
        ...


class ExpertList:
    """One gated feed-forward each, for a CPU.

    Args:
        min_rows: rows a product needs at least, see `packed_linear.min_rows`.
    """

    def __init__(self, experts: Sequence[GatedMlp], min_rows: int) -> None:
        self.experts, self._min_rows = tuple(experts), min_rows

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        return grouped_apply(rows, counts.tolist(), self.experts, self._min_rows)


class ExpertStacks:
    """Three stacks for a GPU; their row counts never leave the device.

    Args:
        gate, up: [num_experts, intermediate, hidden]; down: [num_experts, hidden, intermediate].
    """

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self.gate, self.up, self.down = gate, up, down

    @property
    def num_experts(self) -> int:
        return len(self.gate)

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        multiply = dispatch.chosen("grouped_linear", rows.device.type)
        done: Tensor = multiply(multiply(rows, counts, self.gate, self.up), counts, self.down)
        return done


class MoeLayer:
    """Router and experts of one layer, all on this rank.

    Args:
        router: hidden -> num_experts.
        top_k: experts a token visits.
        normalise_top_k: whether the visited experts' weights are scaled to sum to one (`norm_topk_prob`).

    Attributes:
        trace: is told of every stage that has just ended; a benchmark measures with it.
    """

    def __init__(self, router: Linear, bank: ExpertBank, top_k: int, normalise_top_k: bool) -> None:
        self.router, self.bank = router, bank
        self.top_k, self.normalise_top_k = top_k, normalise_top_k
        self.trace: Callable[[Stage], object] = _ignore

    @property
    def num_experts(self) -> int:
        return self.router.out_features

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (fp32) and expert ids of each token of x [B, hidden]; both [B, top_k]."""
        probs = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, expert_ids = torch.topk(probs, self.top_k, dim=-1)
        if self.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, expert_ids

    def __call__(self, x: Tensor) -> Tensor:
        kind = x.device.type
        weights, expert_ids = self.route(x)
        order = dispatch.chosen("permutation", kind)(expert_ids, self.num_experts)
        rows = dispatch.chosen("permute", kind)(x, order)
        self.trace("dispatch")
        done = self.bank(rows, order.counts)
        self.trace("experts")
        out: Tensor = dispatch.chosen("combine", kind)(done, weights, order)
        return out

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual`, which is left alone."""
        self.trace("attention")
        out = self(x).add_(residual)
        self.trace("combine")
        return out


def _ignore(_stage: Stage) -> None:
    """Nobody measures."""
