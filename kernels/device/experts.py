"""Expert dispatch: a stable counting sort, gather, grouped products whose sizes the host never learns, weighted sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device.launch import power_of_two, widens
from kernels.token_permute import Permutation

COPY_TILE, WIDTH_TILE = 1024, 1024
ROW_TILE, OUT_TILE, IN_TILE = 64, 64, 64


@triton.jit
def sort_kernel(
    experts, token_of_copy, place_of_copy, counts, num_copies, top_k, TILE: tl.constexpr
):
    """Places of one expert's copies: after those of smaller experts, in the order of tokens. Grid (experts,)."""
    own = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_copies, TILE):
        copy = start + tl.arange(0, TILE)
        expert = tl.load(experts + copy, mask=copy < num_copies, other=2147483647)
        before += tl.sum((expert < own).to(tl.int32), 0)
    place = before
    for start in range(0, num_copies, TILE):
        copy = start + tl.arange(0, TILE)
        expert = tl.load(experts + copy, mask=copy < num_copies, other=-1)
        is_own = (expert == own) & (copy < num_copies)
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        at = place + rank - 1
        tl.store(place_of_copy + copy, at.to(tl.int64), mask=is_own)
        tl.store(token_of_copy + at, (copy // top_k).to(tl.int64), mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    tl.store(counts + own, (place - before).to(tl.int64))


@triton.jit
def gather_kernel(tokens, token_of_copy, out, width, TILE: tl.constexpr):
    """Row i of `out` is row token_of_copy[i] of `tokens`. Grid (copies, column tiles)."""
    copy = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(token_of_copy + copy)
    x = tl.load(tokens + row * width + column, mask=column < width)
    tl.store(out + copy * width + column, x, mask=column < width)


@triton.jit
def combine_kernel(copies, weights, places, out, width, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Weighted sum of a token's copies, in the order of its experts. Grid (tokens, column tiles)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + j)
        weight = tl.load(weights + token * TOP_K + j).to(tl.float32)
        x = tl.load(copies + row * width + column, mask=column < width, other=0.0)
        total += x.to(tl.float32) * weight
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _product(
    x, weights, row, column, is_row,
    WIDTH_IN: tl.constexpr, WIDTH_OUT: tl.constexpr, IN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x[row] @ weights[column].T, [ROWS, OUT] in float32, summed over the inputs in one order."""
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, WIDTH_IN, IN):
        k = start + tl.arange(0, IN)
        a = tl.load(
            x + row[:, None] * WIDTH_IN + k[None, :],
            mask=is_row[:, None] & (k < WIDTH_IN)[None, :],
            other=0.0,
        )
        b = tl.load(
            weights + column.to(tl.int64)[None, :] * WIDTH_IN + k[:, None],
            mask=(column < WIDTH_OUT)[None, :] & (k < WIDTH_IN)[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    return total


@triton.jit
def grouped_kernel(
    x, weights, up, counts, out, num_experts, WIDTH_IN: tl.constexpr, WIDTH_OUT: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    GATED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert; GATED: silu(x @ weights.T) * (x @ up.T). Grid (row tiles, column tiles).

    Which expert a tile belongs to follows from the counts, here: no size ever travels to the host.
    """
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e, mask=e < num_experts, other=0).to(tl.int32)
    tiles = (count + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < num_experts:
        first_tile = tl.sum(tl.where(e < expert, tiles, 0), 0)
        first_row = tl.sum(tl.where(e < expert, count, 0), 0)
        num_rows = tl.sum(tl.where(e == expert, count, 0), 0)
        within = (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        is_row = within < num_rows
        row = (first_row + within).to(tl.int64)
        column = tl.program_id(1) * OUT + tl.arange(0, OUT)
        skipped = expert.to(tl.int64) * WIDTH_OUT * WIDTH_IN
        done = _product(x, weights + skipped, row, column, is_row, WIDTH_IN, WIDTH_OUT, IN, WIDEN)
        if GATED:
            times = _product(x, up + skipped, row, column, is_row, WIDTH_IN, WIDTH_OUT, IN, WIDEN)
            done = done * tl.sigmoid(done) * times
        inside = is_row[:, None] & (column < WIDTH_OUT)[None, :]
        where = row[:, None] * WIDTH_OUT + column[None, :]
        tl.store(out + where, done.to(out.dtype.element_ty), mask=inside)


def permutation(expert_ids: Tensor, num_experts: int) -> Permutation:
    """See `kernels.token_permute.permutation`."""
    flat = expert_ids.reshape(-1).contiguous()
    places = torch.empty(len(flat), dtype=torch.long, device=flat.device)
    tokens, counts = (
        torch.empty_like(places),
        torch.zeros(num_experts, dtype=torch.long, device=flat.device),
    )
    if len(flat):
        tile = min(COPY_TILE, power_of_two(len(flat)))
        sort_kernel[num_experts,](
            flat, tokens, places, counts, len(flat), expert_ids.shape[1], TILE=tile
        )
    return Permutation(tokens, places, counts)


def permute(tokens: Tensor, order: Permutation) -> Tensor:
    """Rows of tokens [B, d] as copies [B * k, d], sorted by expert."""
    num_copies, width = len(order.token_of_copy), tokens.shape[1]
    out = torch.empty((num_copies, width), dtype=tokens.dtype, device=tokens.device)
    tile = min(WIDTH_TILE, power_of_two(width))
    if num_copies:
        gather_kernel[num_copies, triton.cdiv(width, tile)](
            tokens.contiguous(), order.token_of_copy, out, width, TILE=tile
        )
    return out


def combine(copies: Tensor, weights: Tensor, order: Permutation) -> Tensor:
    """See `kernels.token_permute.combine`."""
    (num_tokens, top_k), width = weights.shape, copies.shape[1]
    out = torch.empty((num_tokens, width), dtype=copies.dtype, device=copies.device)
    tile = min(WIDTH_TILE, power_of_two(width))
    if num_tokens:
        combine_kernel[num_tokens, triton.cdiv(width, tile)](
            copies.contiguous(), weights.contiguous(), order.place_of_copy, out, width,
            TOP_K=top_k, TILE=tile,
        )  # fmt: skip
    return out


def grouped_linear(
    rows: Tensor, counts: Tensor, weights: Tensor, up: Tensor | None = None
) -> Tensor:
    """See `kernels.grouped_gemm.grouped_linear`. No synchronisation with the host."""
    num_rows, width_in = rows.shape
    num_experts, width_out, _ = weights.shape
    out = torch.empty((num_rows, width_out), dtype=rows.dtype, device=rows.device)
    most_tiles = min(num_rows, num_rows // ROW_TILE + num_experts)
    if most_tiles:
        grouped_kernel[most_tiles, triton.cdiv(width_out, OUT_TILE)](
            rows.contiguous(), weights.contiguous(), (weights if up is None else up).contiguous(),
            counts, out, num_experts, WIDTH_IN=width_in, WIDTH_OUT=width_out,
            EXPERTS=power_of_two(num_experts), ROWS=ROW_TILE, OUT=OUT_TILE, IN=IN_TILE,
            GATED=up is not None, WIDEN=widens(rows.dtype), num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
