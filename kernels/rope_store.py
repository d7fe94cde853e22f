"""Between a layer's projection and its attention: norm of q and k heads, rotation, and the write of K and V.

Heads store the two halves that a rotation turns against each other side by side, so a rotation is one complex product.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """The torch twin: queries [B, heads, head_dim], rotated and scaled; keys and values written to their slots.

    Args:
        qkv: [B, (heads + 2 * kv_heads) * head_dim], left as it is.
        norm: [heads + kv_heads, head_dim] float32 weights of the q and k norms, or None.
        rotation: [max_len, head_dim / 2] complex64, see `actors.engine.rotary.rotation_table`.
        positions, slots: [B]; a slot of -1 stores nothing (a token that pads the step).
        pool: [2 * kv_heads, slots, head_dim] of one layer, written in place.
        q_scale: factor of the queries, head_dim ** -0.5.
    """
    (num_tokens, width), kv_heads, dim = qkv.shape, len(pool) // 2, pool.shape[2]
    split = qkv.view(num_tokens, width // dim, dim)
    heads = split.shape[1] - 2 * kv_heads
    turned = split[:, : heads + kv_heads].float()
    if norm is not None:
        turned = torch.rms_norm(turned, (dim,), None, eps) * norm
    factors = rotation.index_select(0, positions)[:, None]
    turned = (
        torch.view_as_complex(turned.reshape(*turned.shape[:2], dim // 2, 2).contiguous()) * factors
    )
    turned = torch.view_as_real(turned).flatten(2)
    real = torch.nonzero(slots >= 0).flatten()
    stored = torch.cat([turned[:, heads:].to(pool.dtype), split[:, heads + kv_heads :]], 1)
    pool[:, slots[real]] = stored[real].transpose(0, 1)
    return (turned[:, :heads] * q_scale).to(qkv.dtype)
