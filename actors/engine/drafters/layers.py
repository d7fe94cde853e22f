"""Parts of a draft layer: norm, projections with q/k norms, SwiGLU, and the mask of what may be seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.config import DrafterConfig
from actors.engine.rotary import rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Projections(nn.Module):
    """q, k, v and output projections of one attention; inputs are `width` wide (default hidden_size)."""

    def __init__(self, config: DrafterConfig, width: int | None = None) -> None:
        super().__init__()
        width, hd = width or config.hidden_size, config.head_dim
        self.kv_heads, self.head_dim = config.num_key_value_heads, hd
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(width, config.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated queries [..., heads, head_dim] of x [..., width]."""
        shape = (*x.shape[:-1], self.kv_heads * self.group, self.head_dim)
        return rotate(self.q_norm(self.q_proj(x).view(shape)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, [..., kv_heads, head_dim], of x [..., width]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        return keys, self.v_proj(x).view(shape)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def strict_context_mask(anchors: Tensor, span: int) -> Tensor:
    """Return additive fp32 [B, N, span]: 0 where position < anchor, -inf elsewhere (spec 1.5)."""
    visible = torch.arange(span, device=anchors.device) < anchors[..., None]
    return torch.zeros(visible.shape, device=anchors.device).masked_fill(~visible, float("-inf"))
