"""Markov block sampling: three launches a slot, and no row of corrected logits is ever written.

The first launch adds the bias to a tile of logits and keeps one maximum per BLOCK tokens. The k largest tokens of a row
lie in the k blocks with the largest maxima: the second launch chooses these, the third computes only them again and
decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.core.sampling import PURPOSE_DRAFT as _DRAFT
from actors.core.sampling import RULE_COUPLED as _COUPLED
from actors.core.sampling import RULE_GREEDY as _GREEDY
from kernels.block_reference import BlockSample, DraftSampling, MarkovHead
from kernels.device.launch import power_of_two, widens
from kernels.device.noise import exponential, row_hash, uniform
from kernels.device.order import LOWEST, index_of, ordered_bits, packed, value_of
from kernels.reference import MIN_TEMPERATURE as _MIN_TEMPERATURE

PURPOSE_DRAFT, RULE_COUPLED, RULE_GREEDY = (tl.constexpr(x) for x in (_DRAFT, _COUPLED, _GREEDY))
MIN_TEMPERATURE = tl.constexpr(_MIN_TEMPERATURE)
ROW_TILE, TOKEN_TILE, RANK_TILE, GATHER_RANK = 16, 128, 64, 16
TOKENS_A_MAXIMUM, MOST_MAXIMA = 32, 8192


@triton.jit
def block_maxima_kernel(
    base, row_stride, w1, w2, previous, previous_stride, maxima, num_rows, vocab, num_maxima,
    RANK: tl.constexpr, RANK_TILE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Largest corrected logit of each BLOCK tokens. Grid (row tiles, token tiles)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = row < num_rows, token < vocab
    inside = is_row[:, None] & is_token[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + token[None, :]
    logits = tl.load(base + at, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        before = tl.load(previous + row.to(tl.int64) * previous_stride, mask=is_row, other=0)
        bias = tl.zeros([ROWS, TOKENS], tl.float32)
        for start in tl.static_range(0, RANK, RANK_TILE):
            r = start + tl.arange(0, RANK_TILE)
            known = (r < RANK)[None, :]
            own = tl.load(
                w1 + before[:, None] * RANK + r[None, :], mask=is_row[:, None] & known, other=0.0
            )
            theirs = tl.load(
                w2 + token.to(tl.int64)[:, None] * RANK + r[None, :],
                mask=is_token[:, None] & known,
                other=0.0,
            )
            if WIDEN:
                own, theirs = own.to(tl.float32), theirs.to(tl.float32)
            bias += tl.dot(own, tl.trans(theirs), input_precision="ieee")
        logits += bias.to(w2.dtype.element_ty).to(tl.float32)
    best = tl.max(tl.reshape(logits, [ROWS, TOKENS // BLOCK, BLOCK]), 2)
    place = tl.program_id(1) * (TOKENS // BLOCK) + tl.arange(0, TOKENS // BLOCK)
    where = row.to(tl.int64)[:, None] * num_maxima + place[None, :]
    tl.store(maxima + where, best, mask=is_row[:, None] & (place < num_maxima)[None, :])


@triton.jit
def choose_blocks_kernel(maxima, blocks, num_maxima, MAXIMA: tl.constexpr, TOP: tl.constexpr):
    """The TOP blocks with the largest maxima, in the order of the vocabulary; num_maxima pads. Grid (rows,).

    The TOP-th largest is found by halving the range of the ordered bits: a sort of thousands is a megabyte of code.
    """
    row = tl.program_id(0).to(tl.int64)
    place, rank = tl.arange(0, MAXIMA), tl.arange(0, TOP)
    known = place < num_maxima
    best = tl.load(maxima + row * num_maxima + place, mask=known, other=float("-inf"))
    bits = ordered_bits(best)
    count = tl.minimum(num_maxima, TOP)
    low, high = tl.full([], -(2**31), tl.int64), tl.full([], 2**31 - 1, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = tl.sum((known & (bits >= middle.to(tl.int32))).to(tl.int32), 0) >= count
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    least = low.to(tl.int32)
    above, equal = known & (bits > least), known & (bits == least)
    left = count - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    at = blocks + row * TOP
    tl.store(at + tl.cumsum(taken.to(tl.int32), 0) - 1, place, mask=taken)
    tl.store(at + rank, num_maxima + tl.zeros_like(rank), mask=rank >= count)


@triton.jit
def _support(
    base, blocks, w1, w2, before, vocab,
    RANK: tl.constexpr, GATHER_RANK: tl.constexpr, BLOCK: tl.constexpr,
    TOP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The TOP largest corrected logits of a row: packed numbers, largest first."""
    block = tl.load(blocks + tl.arange(0, TOP))
    token = tl.reshape(block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [TOP * BLOCK])
    inside = token < vocab
    logits = tl.load(base + token, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        bias = tl.zeros([TOP * BLOCK], tl.float32)
        for start in range(0, RANK, GATHER_RANK):
            r = start + tl.arange(0, GATHER_RANK)
            own = tl.load(w1 + before * RANK + r, mask=r < RANK, other=0.0).to(tl.float32)
            theirs = tl.load(
                w2 + token.to(tl.int64)[:, None] * RANK + r[None, :],
                mask=inside[:, None] & (r < RANK)[None, :],
                other=0.0,
            )
            bias += tl.sum(theirs.to(tl.float32) * own[None, :], 1)
        logits += bias.to(w2.dtype.element_ty).to(tl.float32)
    return tl.topk(tl.where(inside, packed(logits, token), LOWEST), TOP)


@triton.jit
def _law(values, is_real, temperature, top_p, top_k, width, TRUNCATES: tl.constexpr):
    """q over a sorted support [TOP]."""
    rank = tl.arange(0, values.shape[0])
    scaled = (values - tl.max(values, 0)) / tl.maximum(temperature, MIN_TEMPERATURE)
    probs = tl.where(is_real, tl.exp(scaled), 0.0)
    probs = probs / tl.sum(probs, 0)
    if TRUNCATES:
        limit = tl.where(top_k > 0, top_k, width)
        probs = tl.where(rank >= limit, 0.0, probs)
        probs = probs / tl.sum(probs, 0)
        past = tl.cumsum(probs, 0) - probs
        probs = tl.where((past >= top_p) & (rank > 0), 0.0, probs)
        probs = probs / tl.sum(probs, 0)
    return probs


@triton.jit
def draw_kernel(
    base, row_stride, blocks, w1, w2, previous, previous_stride, target_ids,
    temperature, top_p, top_k, noise_key, rule, anchor_positions, draws,
    drafted, q_ids, q_probs, embeddings, slot, gamma, draft_top_k, width, vocab,
    RANK: tl.constexpr, GATHER_RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, TOP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr, HAS_DRAWS: tl.constexpr, TRUNCATES: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """Decide slot `slot` of a row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(previous + row * previous_stride)
    best = _support(
        base + row * row_stride, blocks + row * TOP, w1, w2, before, vocab,
        RANK, GATHER_RANK, BLOCK, TOP, HAS_BIAS,
    )  # fmt: skip
    rank = tl.arange(0, TOP)
    is_real = (rank < width) & (best != LOWEST)
    token = tl.where(is_real, index_of(best), 0).to(tl.int64)
    if HAS_MAP:
        token = tl.load(target_ids + token, mask=is_real, other=0)
    law, key = tl.load(rule + row), tl.load(noise_key + row)
    position = tl.load(anchor_positions + row) + slot + 1
    probs = _law(
        tl.where(is_real, value_of(best), float("-inf")), is_real,
        tl.load(temperature + row), tl.load(top_p + row), tl.load(top_k + row), width, TRUNCATES,
    )  # fmt: skip
    probs = tl.where(law == RULE_GREEDY, (rank == 0).to(tl.float32), probs)
    if HAS_DRAWS:
        u = tl.load(draws + row * gamma + slot)
    else:
        u = uniform(key, position, slot + PURPOSE_DRAFT)
    cumulated = tl.cumsum(probs.to(tl.float64), 0)
    pick = tl.sum((cumulated <= u * tl.max(cumulated, 0)).to(tl.int32), 0)
    if COUPLED:
        time = exponential(row_hash(key, position, 0), token)
        shared = tl.max(packed(tl.where(is_real, probs / time, -1.0), rank), 0)
        pick = tl.where(law == RULE_COUPLED, index_of(shared), pick)
    pick = tl.where(law == RULE_GREEDY, 0, tl.minimum(pick, TOP - 1))
    cell = row * gamma + slot
    tl.store(drafted + cell, tl.sum(tl.where(rank == pick, token, 0), 0))
    shown = is_real & ((rank == 0) | (law != RULE_GREEDY))
    inside = rank < draft_top_k
    tl.store(q_ids + cell * draft_top_k + rank, tl.where(shown, token, -1), mask=inside)
    tl.store(q_probs + cell * draft_top_k + rank, tl.where(shown, probs, 0.0), mask=inside)
    if HAS_BIAS:
        r = tl.arange(0, RANK_BLOCK)
        known = r < RANK
        tl.store(
            embeddings + cell * RANK + r, tl.load(w1 + before * RANK + r, mask=known), mask=known
        )


def sample_block(
    base_logits: Tensor,
    markov: MarkovHead | None,
    anchors: Tensor,
    anchor_positions: Tensor,
    sampling: DraftSampling,
    draft_top_k: int,
    d2t: Tensor | None = None,
    draws: Tensor | None = None,
) -> BlockSample:
    """See `kernels.block_reference.sample_block`. No synchronisation with the host: it can be captured in a graph."""
    num_rows, gamma, vocab = base_logits.shape
    base, device = base_logits.contiguous(), base_logits.device
    width = 1 if sampling.all_greedy else min(draft_top_k, vocab)
    block = max(TOKENS_A_MAXIMUM, power_of_two(triton.cdiv(vocab, MOST_MAXIMA)))
    num_maxima = triton.cdiv(vocab, block)
    q_ids = torch.full((num_rows, gamma, draft_top_k), -1, dtype=torch.long, device=device)
    q_probs = torch.zeros(q_ids.shape, dtype=torch.float32, device=device)
    drafted = torch.empty((num_rows, gamma), dtype=torch.long, device=device)
    maxima = torch.empty((num_rows, num_maxima), dtype=torch.float32, device=device)
    has_bias, top = markov is not None, power_of_two(width, 2)
    blocks = torch.empty((num_rows, top), dtype=torch.int32, device=device)
    w1, w2 = (base, base) if markov is None else (markov.w1.contiguous(), markov.w2.contiguous())
    rank = 0 if markov is None else w1.shape[1]
    embeddings = torch.empty((num_rows, gamma, rank), dtype=w1.dtype, device=device)
    anchors = anchors.long().contiguous()
    tile = max(TOKEN_TILE, block)
    for slot in range(gamma if num_rows else 0):
        previous, stride = (drafted[:, slot - 1], gamma) if slot else (anchors, 1)
        logits = base[:, slot]
        block_maxima_kernel[triton.cdiv(num_rows, ROW_TILE), triton.cdiv(vocab, tile)](
            logits, gamma * vocab, w1, w2, previous, stride, maxima, num_rows, vocab, num_maxima,
            RANK=rank, RANK_TILE=RANK_TILE, ROWS=ROW_TILE, TOKENS=tile, BLOCK=block,
            HAS_BIAS=has_bias, WIDEN=widens(w1.dtype), num_warps=4,
        )  # fmt: skip
        choose_blocks_kernel[num_rows,](
            maxima, blocks, num_maxima, MAXIMA=power_of_two(num_maxima), TOP=top, num_warps=8
        )
        draw_kernel[num_rows,](
            logits, gamma * vocab, blocks, w1, w2, previous, stride, anchors if d2t is None else d2t,
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.noise_key, sampling.rule,
            anchor_positions, sampling.temperature if draws is None else draws.contiguous(),
            drafted, q_ids, q_probs, embeddings,
            slot, gamma, draft_top_k, width, vocab,
            RANK=rank, GATHER_RANK=GATHER_RANK, RANK_BLOCK=power_of_two(rank),
            BLOCK=block, TOP=top, HAS_BIAS=has_bias,
            HAS_MAP=d2t is not None, HAS_DRAWS=draws is not None,
            TRUNCATES=sampling.any_truncated, COUPLED=sampling.any_coupled, num_warps=8,
        )  # fmt: skip
    return BlockSample(drafted, q_ids, q_probs, embeddings if has_bias else None)
