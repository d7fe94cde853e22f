"""The sparse feed-forward layer of Qwen3-MoE and Mixtral: softmax routing to the k most probable experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.packed_linear import GatedMlp, Linear
from kernels import dispatch
from kernels.grouped_gemm import grouped_apply
from kernels.token_permute import combine, permutation


class MoeLayer:
    """Router and experts of one layer.

    Args:
        router: hidden -> num_experts.
        experts: one gated feed-forward each.
        top_k: experts a token visits.
        normalise_top_k: whether the visited experts' weights are scaled to sum to one (`norm_topk_prob`).
        min_rows: rows a product needs at least, see `packed_linear.min_rows`.
    """

    def __init__(
        self,
        router: Linear,
        experts: Sequence[GatedMlp],
        top_k: int,
        normalise_top_k: bool,
        min_rows: int,
    ) -> None:
        self.router, self.experts = router, tuple(experts)
        self.top_k, self.normalise_top_k = top_k, normalise_top_k
        self.min_rows = min_rows

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (x's dtype) and expert ids of each token of x [B, hidden]; both [B, top_k]."""
        probs = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, expert_ids = torch.topk(probs, self.top_k, dim=-1)
        if self.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), expert_ids

    def __call__(self, x: Tensor) -> Tensor:
        weights, expert_ids = self.route(x)
        sorted_copies = permutation(expert_ids, len(self.experts))
        rows = x.index_select(0, sorted_copies.token_of_copy)
        done = grouped_apply(rows, sorted_copies.counts.tolist(), self.experts, self.min_rows)
        return combine(done, weights, sorted_copies)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual`, which is left alone."""
        return self(x).add_(residual)


class StackedMoeLayer(MoeLayer):
    """The same on a GPU: experts in three stacks, their row counts never leave the device.

    Args:
        gate, up: [num_experts, intermediate, hidden]; down: [num_experts, hidden, intermediate].
    """

    def __init__(
        self,
        router: Linear,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        top_k: int,
        normalise_top_k: bool,
    ) -> None:
        super().__init__(router, (), top_k, normalise_top_k, min_rows=1)
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: Tensor) -> Tensor:
        kind = x.device.type
        weights, expert_ids = self.route(x)
        order = dispatch.chosen("permutation", kind)(expert_ids, len(self.gate))
        multiply = dispatch.chosen("grouped_linear", kind)
        rows = dispatch.chosen("permute", kind)(x, order)
        inner = multiply(rows, order.counts, self.gate, self.up)
        done = multiply(inner, order.counts, self.down)
        out: Tensor = dispatch.chosen("combine", kind)(done, weights, order)
        return out
