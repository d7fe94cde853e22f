"""Rotary position embedding, half-split layout (Su et al., RoFormer)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(dim: int, theta: float, length: int) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each fp32 [length, dim], computed in float64."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, dim] by cos, sin [..., 1, dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin
