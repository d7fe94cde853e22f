"""Rotary position embedding (Su et al., RoFormer): the halves of a head apart, and side by side for the target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.engine.checkpoint import RopeConfig


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


def pair_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (i, i + head_dim / 2) of each head become rows (2 i, 2 i + 1); weight [heads * head_dim, ...]."""
    split = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def rotation_table(rope: RopeConfig, head_dim: int, max_len: int) -> Tensor:
    """exp(i * position * frequency), complex64 [max_len, head_dim / 2], computed in float64 (RoFormer, eq. 34)."""
    frequencies = rope_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, float64 [head_dim / 2]; `linear` divides all by the factor, `llama3` the slow ones."""
    plain = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    # Turns a frequency makes within the trained length: few turns = slow = stretched, with a ramp between.
    turns = rope.original_max_len * plain / (2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rope.factor
