"""Norm of the heads, rotation and K/V write in one pass over the projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device.launch import power_of_two


@triton.jit
def rope_store_kernel(
    qkv, norm, rotation, positions, slots, pool, queries, num_slots, eps, q_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One head of one token. Grid (tokens, HEADS + 2 * KV_HEADS)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    start = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    even = tl.load(start + 2 * pair, mask=inside, other=0.0)
    odd = tl.load(start + 2 * pair + 1, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        x, y = even.to(tl.float32), odd.to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt_rn(tl.sum(x * x + y * y, 0) / (2 * HALF) + eps)
            weight = norm + head * (2 * HALF) + 2 * pair
            x = x * scale * tl.load(weight, mask=inside, other=0.0)
            y = y * scale * tl.load(weight + 1, mask=inside, other=0.0)
        at = rotation + tl.load(positions + token).to(tl.int64) * (2 * HALF) + 2 * pair
        cos = tl.load(at, mask=inside, other=0.0)
        sin = tl.load(at + 1, mask=inside, other=0.0)
        factor = tl.where(head < HEADS, q_scale, 1.0)
        even = ((x * cos - y * sin) * factor).to(qkv.dtype.element_ty)
        odd = ((x * sin + y * cos) * factor).to(qkv.dtype.element_ty)
    if head < HEADS:
        target = queries + (token * HEADS + head) * (2 * HALF) + 2 * pair
        tl.store(target, even, mask=inside)
        tl.store(target + 1, odd, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        place = pool + ((head - HEADS).to(tl.int64) * num_slots + slot) * (2 * HALF) + 2 * pair
        # A token that only pads the step has slot -1 and leaves no trace.
        tl.store(place, even, mask=inside & (slot >= 0))
        tl.store(place + 1, odd, mask=inside & (slot >= 0))


def rope_store(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    rotation: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    q_scale: float,
) -> Tensor:
    """See `kernels.rope_store.rope_store`."""
    (num_tokens, width), kv_heads, dim = qkv.shape, len(pool) // 2, pool.shape[2]
    heads = width // dim - 2 * kv_heads
    qkv, turns = qkv.contiguous(), torch.view_as_real(rotation)
    queries = torch.empty((num_tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        rope_store_kernel[num_tokens, heads + 2 * kv_heads](
            qkv, turns if norm is None else norm, turns, positions, slots, pool, queries,
            pool.shape[1], eps, q_scale,
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_BLOCK=power_of_two(dim // 2),
            HAS_NORM=norm is not None, num_warps=1,
        )  # fmt: skip
    return queries
