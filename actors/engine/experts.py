"""Feed-forward layers made of experts: chosen by a softmax router (Qwen3-MoE, Mixtral), or all of them always on."""

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


class Router(Protocol):
    """Says which experts a token visits, and how much each counts."""

    hidden_size: int
    num_experts: int
    top_k: int  # experts a token visits

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (fp32) and expert ids of each token of x [B, hidden]; both [B, top_k]."""
        ...


class TopKRouter:
    """The most probable experts by a softmax.

    Args:
        gate: hidden -> num_experts.
        normalise: whether the visited experts' weights are scaled to sum to one (`norm_topk_prob`).
    """

    def __init__(self, gate: Linear, top_k: int, normalise: bool) -> None:
        self.gate, self.top_k, self.normalise = gate, top_k, normalise
        self.num_experts, self.hidden_size = gate.out_features, gate.in_features

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        probs = torch.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, expert_ids = torch.topk(probs, self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, expert_ids


class AlwaysOn:
    """Every token visits every expert, in their order and with weight one: slices of one dense feed-forward."""

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        self.num_experts = self.top_k = num_experts
        self.hidden_size = hidden_size

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        expert_ids = torch.arange(self.top_k, device=x.device).expand(len(x), -1)
        return torch.ones(expert_ids.shape, dtype=torch.float32, device=x.device), expert_ids


class MoeLayer:
    """Router and experts of one layer, all on this rank.

    Attributes:
        trace: is told of every stage that has just ended; a benchmark measures with it.
    """

    def __init__(self, router: Router, bank: ExpertBank) -> None:
        self.router, self.bank = router, bank
        self.trace: Callable[[Stage], object] = _ignore

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        return self.router(x)

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
