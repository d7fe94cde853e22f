"""Survivals and verify lengths under (lambda, K) without a sort and without leaving the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device.launch import power_of_two

ROW_TILE = 128
KEY_BITS = tl.constexpr(62)
MOST_CELLS = 16384  # of one program: 2048 requests of gamma 8


@triton.jit
def survivals_kernel(confidences, has_proposal, out, num_rows, gamma, ROWS: tl.constexpr):
    """Running products, in the order of the slots. Grid (row tiles,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < num_rows
    survival = tl.load(has_proposal + row, mask=known, other=0).to(tl.float32)
    for slot in range(gamma):
        c = tl.load(confidences + row * gamma + slot, mask=known, other=0.0).to(tl.float32)
        c = tl.where(c == c, c, 0.0)  # not a number: no confidence
        survival *= tl.minimum(tl.maximum(c, 0.0), 1.0)
        tl.store(out + row * gamma + slot, survival, mask=known)


@triton.jit
def allocate_kernel(
    survivals, caps, limits, min_survival, verify_len, num_rows, gamma,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """verify_len of all rows: the K largest eligible survivals. Grid (1,).

    A cell's key is (survival, earlier slot, earlier row): no two are equal, so the K-th largest, found by halving the
    key range, admits exactly K cells.
    """
    row, slot = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    inside = (row < num_rows)[:, None] & (slot < gamma)[None, :]
    a = tl.load(survivals + row[:, None] * gamma + slot[None, :], mask=inside, other=0.0)
    cap = tl.load(caps + row, mask=row < num_rows, other=0)
    fits = inside & (a >= tl.load(min_survival)) & (slot[None, :] < cap[:, None])
    eligible = tl.cumsum((~fits).to(tl.int32), 1) == 0
    order = slot[None, :] * num_rows + row[:, None]
    # Adding zero turns -0.0 into 0.0: both are the same survival.
    bits = (a + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(eligible, (bits << 31) | (0x7FFFFFFF - order).to(tl.int64), -1)
    limit = tl.maximum(tl.load(limits), 0)
    # Largest threshold that at least K keys reach; 0, which all eligible ones reach, where there are fewer.
    low, high = tl.zeros([], tl.int64), tl.full([], 1, tl.int64) << KEY_BITS
    for _ in range(KEY_BITS):
        middle = low + (high - low) // 2
        enough = tl.sum(tl.sum((key >= middle).to(tl.int32), 1), 0) >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    chosen = (key >= low) & (limit > 0)
    tl.store(verify_len + row, tl.sum(chosen.to(tl.int64), 1), mask=row < num_rows)


def survivals(confidences: Tensor, has_proposal: Tensor) -> Tensor:
    """See `kernels.survival.survivals`."""
    num_rows, gamma = confidences.shape
    out = torch.empty((num_rows, gamma), dtype=torch.float32, device=confidences.device)
    if num_rows and gamma:
        survivals_kernel[triton.cdiv(num_rows, ROW_TILE),](
            confidences.contiguous(), has_proposal, out, num_rows, gamma, ROWS=ROW_TILE
        )
    return out


def allocate(
    survival: Tensor, max_draft_tokens: int | Tensor, min_survival: float | Tensor, caps: Tensor
) -> Tensor:
    """See `kernels.survival.allocate`. K and lambda may be one-element tensors, which a graph reads anew."""
    num_rows, gamma = survival.shape
    device = survival.device
    out = torch.zeros(num_rows, dtype=torch.long, device=device)
    if not num_rows or not gamma:
        return out
    rows, slots = power_of_two(num_rows), power_of_two(gamma)
    assert rows * slots <= MOST_CELLS, (
        f"{num_rows} rows of {gamma} slots are too many for one program"
    )
    limit = torch.as_tensor(max_draft_tokens, dtype=torch.long, device=device)
    price = torch.as_tensor(min_survival, dtype=torch.float32, device=device)
    allocate_kernel[1,](
        survival.contiguous(), caps.contiguous(), limit, price, out, num_rows, gamma,
        ROWS=rows, SLOTS=slots, num_warps=8,
    )  # fmt: skip
    return out
