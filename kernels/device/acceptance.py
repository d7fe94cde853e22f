"""Ragged acceptance: statistics of each logit row, then one program a request that accepts and samples.

No distribution is written: a probability is exp(logit / temperature - maximum) / sum, cut at a floor, so four numbers
stand for a row of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.core.sampling import PURPOSE_ACCEPT as _ACCEPT
from actors.core.sampling import PURPOSE_SAMPLE as _SAMPLE
from actors.core.sampling import RULE_COUPLED, RULE_REJECTION
from kernels.device.launch import power_of_two
from kernels.device.noise import exponential, row_hash, uniform
from kernels.device.order import LOWEST, index_of, packed
from kernels.reference import MIN_RESIDUAL_MASS as _MIN_RESIDUAL_MASS
from kernels.reference import MIN_TEMPERATURE as _MIN_TEMPERATURE
from kernels.reference import Draws, RuleGroup, VerifyBatch

PURPOSE_ACCEPT, PURPOSE_SAMPLE = tl.constexpr(_ACCEPT), tl.constexpr(_SAMPLE)
MIN_TEMPERATURE = tl.constexpr(_MIN_TEMPERATURE)
MIN_RESIDUAL_MASS = tl.constexpr(_MIN_RESIDUAL_MASS)
ABOVE_ONE = tl.constexpr(0x3F800001)  # bits of the float after 1.0
HALVINGS = tl.constexpr(30)
STATS = tl.constexpr(4)  # maximum, sum, floor, kept mass
VOCAB_TILE, COUPLED_TILE = 4096, 1024


@triton.jit
def _scaled(logits, token, vocab, temperature):
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return x / temperature


@triton.jit
def _prob(logits, token, vocab, temperature, top, total, floor, kept):
    """The served probability of tokens; zero beyond the vocabulary and below the floor."""
    p = tl.exp(_scaled(logits, token, vocab, temperature) - top) / total
    return tl.where(p < floor, 0.0, p / kept)


@triton.jit
def _mass_from(
    logits, vocab, temperature, top, total, bits, COUNT: tl.constexpr, TILE: tl.constexpr
):
    """Mass, or number, of the tokens whose probability has at least these float bits."""
    least = bits.to(tl.float32, bitcast=True)
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        p = tl.exp(_scaled(logits, token, vocab, temperature) - top) / total
        chosen = (p >= least) & (token < vocab)
        weight = chosen.to(tl.float32) if COUNT else tl.where(chosen, p, 0.0)
        mass += tl.sum(weight, 0).to(tl.float64)
    return mass


@triton.jit
def _floor_bits(
    logits, vocab, temperature, top, total, goal, low, COUNT: tl.constexpr, TILE: tl.constexpr
):
    """Largest bits from `low` on whose tokens reach the goal: floats above zero are ordered like their bits."""
    high = tl.full([], ABOVE_ONE, tl.int32)
    for _ in range(HALVINGS):
        middle = low + (high - low) // 2
        mass = _mass_from(logits, vocab, temperature, top, total, middle, COUNT, TILE)
        low = tl.where(mass >= goal, middle, low)
        high = tl.where(mass >= goal, high, middle)
    return low


@triton.jit
def row_stats_kernel(
    logits, rows, request_of_row, temperatures, top_ps, top_ks, stats, vocab,
    TRUNCATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Maximum, sum, floor and kept mass of each row. Grid (rows of the group,)."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(request_of_row + row)
    own = logits + tl.load(rows + row) * vocab
    temperature = tl.maximum(tl.load(temperatures + request), MIN_TEMPERATURE)
    top, total = float("-inf"), 0.0
    for start in range(0, vocab, TILE):
        x = _scaled(own, start + tl.arange(0, TILE), vocab, temperature)
        higher = tl.maximum(top, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = higher
    floor = tl.zeros([], tl.int32)
    kept = tl.full([], 1.0, tl.float32)
    if TRUNCATES:
        top_p, top_k = tl.load(top_ps + request), tl.load(top_ks + request)
        if top_k > 0:
            goal = tl.minimum(top_k, vocab).to(tl.float64)
            floor = _floor_bits(own, vocab, temperature, top, total, goal, floor, True, TILE)
        if top_p < 1.0:
            goal = top_p.to(tl.float64) * _mass_from(
                own, vocab, temperature, top, total, floor, False, TILE
            )
            floor = _floor_bits(own, vocab, temperature, top, total, goal, floor, False, TILE)
        if (top_k > 0) | (top_p < 1.0):
            kept = _mass_from(own, vocab, temperature, top, total, floor, False, TILE).to(
                tl.float32
            )
    tl.store(stats + row * STATS, top)
    tl.store(stats + row * STATS + 1, total)
    tl.store(stats + row * STATS + 2, floor.to(tl.float32, bitcast=True))
    tl.store(stats + row * STATS + 3, kept)


@triton.jit
def _row_law(stats, row):
    at = stats + row * STATS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def probs_kernel(logits, temperatures, stats, out, vocab, TILE: tl.constexpr):
    """The distributions themselves. Grid (rows, vocabulary tiles)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    temperature = tl.maximum(tl.load(temperatures + row), MIN_TEMPERATURE)
    top, total, floor, kept = _row_law(stats, row)
    p = _prob(logits + row * vocab, token, vocab, temperature, top, total, floor, kept)
    tl.store(out + row * vocab + token, p, mask=token < vocab)


@triton.jit
def emit_kernel(
    logits, rows, request_of_row, temperatures, noise_keys, positions, stats, emitted, vocab,
    COUPLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token a row decides without fresh randomness: argmax of the logits, or of p / E. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    own = logits + tl.load(rows + row) * vocab
    best = tl.full([], LOWEST, tl.int64)
    if COUPLED:
        request = tl.load(request_of_row + row)
        temperature = tl.maximum(tl.load(temperatures + request), MIN_TEMPERATURE)
        noise = row_hash(tl.load(noise_keys + request), tl.load(positions + row), 0)
        top, total, floor, kept = _row_law(stats, row)
    for start in range(0, vocab, TILE):
        token = start + tl.arange(0, TILE)
        if COUPLED:
            p = _prob(own, token, vocab, temperature, top, total, floor, kept)
            score = p / exponential(noise, token)
        else:
            score = _scaled(own, token, vocab, 1.0)
        number = tl.where(token < vocab, packed(score, token), LOWEST)
        best = tl.maximum(best, tl.max(number, 0))
    tl.store(emitted + row, index_of(best).to(tl.int64))


@triton.jit
def _leading_run(accepted, slots, SLOTS: tl.constexpr):
    return tl.min(tl.where(accepted, SLOTS, slots), 0)


@triton.jit
def accept_equal_kernel(
    emitted, requests, row_start, verify_len, drafted, num_accepted, next_token, width,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Accept draft tokens that are the emitted ones. Grid (requests of the group,)."""
    request = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    first = tl.load(row_start + request)
    known = slots < tl.load(verify_len + request)
    ours = tl.load(drafted + request * width + slots, mask=known, other=-1)
    theirs = tl.load(emitted + first + slots, mask=known, other=-2)
    run = _leading_run(known & (ours == theirs), slots, SLOTS)
    place = tl.load(requests + request)
    tl.store(num_accepted + place, run.to(tl.int64))
    tl.store(next_token + place, tl.load(emitted + first + run))


@triton.jit
def _accepted(
    logits, rows, first, known, drafted, q_ids, q_probs, support, accept_u, positions, key,
    temperature, stats, vocab, slots, SLOTS: tl.constexpr, SUPPORT: tl.constexpr,
    HAS_DRAWS: tl.constexpr,
):  # fmt: skip
    """Draft tokens accepted by min(1, p / q), the longest run from the first slot."""
    row = first + slots
    token = tl.load(drafted + slots, mask=known, other=0)
    at = tl.load(rows + row, mask=known, other=0) * vocab + token
    x = tl.load(logits + at, mask=known, other=float("-inf")).to(tl.float32) / temperature
    law = stats + row * STATS
    top, total = tl.load(law, mask=known, other=0.0), tl.load(law + 1, mask=known, other=1.0)
    floor, kept = tl.load(law + 2, mask=known, other=0.0), tl.load(law + 3, mask=known, other=1.0)
    p = tl.exp(x - top) / total
    p = tl.where(p < floor, 0.0, p / kept)
    j = tl.arange(0, SUPPORT)
    cell = slots[:, None] * support + j[None, :]
    inside = known[:, None] & (j < support)[None, :]
    same = tl.load(q_ids + cell, mask=inside, other=-1) == token[:, None]
    q = tl.sum(tl.where(same, tl.load(q_probs + cell, mask=inside, other=0.0), 0.0), 1)
    if HAS_DRAWS:
        u = tl.load(accept_u + slots, mask=known, other=1.0)
    else:
        position = tl.load(positions + row, mask=known, other=0)
        u = uniform(key, position, PURPOSE_ACCEPT)
    return _leading_run(known & (q > 0) & (u * q.to(tl.float64) < p.to(tl.float64)), slots, SLOTS)


@triton.jit
def _draw(
    own, q_ids, q_probs, support, u, temperature, top, total, floor, kept, vocab,
    SUPPORT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Index drawn from max(p - q, 0) with q over a support of ids (-1 pads), or from p where that has no mass.

    A tile's mass is that of p less min(p, q) over the support in it, so only one tile is compared token by token.
    """
    j = tl.arange(0, SUPPORT)
    q_token = tl.load(q_ids + j, mask=j < support, other=-1)
    q_mass = tl.load(q_probs + j, mask=j < support, other=0.0)
    is_support = q_token >= 0
    shared = _prob(
        own, tl.where(is_support, q_token, vocab), vocab, temperature, top, total, floor, kept
    )
    shared = tl.where(is_support, tl.minimum(shared, q_mass), 0.0).to(tl.float64)
    p_mass = tl.zeros([], tl.float64)
    for start in range(0, vocab, TILE):
        p = _prob(own, start + tl.arange(0, TILE), vocab, temperature, top, total, floor, kept)
        p_mass += tl.sum(p.to(tl.float64), 0)
    left = p_mass - tl.sum(shared, 0)
    use = left > MIN_RESIDUAL_MASS
    shared = tl.where(use, shared, 0.0)
    target = u * tl.where(use, left, p_mass)
    passed = tl.zeros([], tl.float64)  # mass of the tiles before the one that holds the target
    cumulated = tl.zeros([], tl.float64)
    chosen = tl.zeros([], tl.int32)
    for start in range(0, vocab, TILE):
        p = _prob(own, start + tl.arange(0, TILE), vocab, temperature, top, total, floor, kept)
        here = is_support & (q_token >= start) & (q_token < start + TILE)
        cumulated += tl.sum(p.to(tl.float64), 0) - tl.sum(tl.where(here, shared, 0.0), 0)
        is_before = cumulated <= target
        chosen = tl.where(is_before, start + TILE, chosen)
        passed = tl.where(is_before, cumulated, passed)
    token = tl.minimum(chosen, (vocab - 1) // TILE * TILE) + tl.arange(0, TILE)
    p = _prob(own, token, vocab, temperature, top, total, floor, kept).to(tl.float64)
    weight = p
    for place in range(support):
        mass = tl.where(use, tl.load(q_probs + place), 0.0).to(tl.float64)
        weight -= tl.where(token == tl.load(q_ids + place), mass, 0.0)
    weight = tl.maximum(weight, 0.0)
    is_after = passed + tl.cumsum(weight, 0) > target
    drawn = tl.min(tl.where(is_after & (weight > 0), token, vocab), 0)
    # Rounding may leave the target beyond the last token: then it is the last one that has any mass.
    last = tl.max(tl.where(weight > 0, token, 0), 0)
    return tl.minimum(drawn, last)


@triton.jit
def accept_reject_kernel(
    logits, rows, requests, row_start, verify_len, drafted, q_ids, q_probs, positions,
    noise_keys, temperatures, accept_u, sample_u, draw_width, stats, num_accepted, next_token,
    width, support, vocab,
    SLOTS: tl.constexpr, SUPPORT: tl.constexpr, HAS_DRAWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Speculative sampling of one request. Grid (requests of the group,)."""
    request = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    first, length = tl.load(row_start + request), tl.load(verify_len + request)
    key, place = tl.load(noise_keys + request), tl.load(requests + request)
    temperature = tl.maximum(tl.load(temperatures + request), MIN_TEMPERATURE)
    own_q = request * width * support
    run = _accepted(
        logits, rows, first, slots < length, drafted + request * width, q_ids + own_q,
        q_probs + own_q, support, accept_u + place * draw_width, positions, key, temperature,
        stats, vocab, slots, SLOTS, SUPPORT, HAS_DRAWS,
    )  # fmt: skip
    row = first + run
    top, total, floor, kept = _row_law(stats, row)
    if HAS_DRAWS:
        u = tl.load(sample_u + place)
    else:
        u = uniform(key, tl.load(positions + row), PURPOSE_SAMPLE)
    # The row after the accepted run: the residual where a draft was refused, else the plain law.
    refused = tl.where(run < length, support, 0)
    own = logits + tl.load(rows + row) * vocab
    own_q += run * support
    token = _draw(
        own, q_ids + own_q, q_probs + own_q, refused, u, temperature, top, total, floor, kept, vocab,
        SUPPORT, TILE,
    )  # fmt: skip
    tl.store(num_accepted + place, run.to(tl.int64))
    tl.store(next_token + place, token.to(tl.int64))


def process_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, *, truncates: bool = True
) -> Tensor:
    """See `kernels.reference.process_logits`."""
    num_rows, vocab = logits.shape
    logits, tile = logits.contiguous(), min(VOCAB_TILE, power_of_two(vocab))
    out = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits.device)
    stats = torch.empty((num_rows, 4), dtype=torch.float32, device=logits.device)
    rows = torch.arange(num_rows, device=logits.device)
    if num_rows:
        row_stats_kernel[num_rows,](
            logits, rows, rows, temperature, top_p, top_k, stats, vocab,
            TRUNCATES=truncates, TILE=tile, num_warps=8,
        )  # fmt: skip
        probs_kernel[num_rows, triton.cdiv(vocab, tile)](
            logits, temperature, stats, out, vocab, TILE=tile, num_warps=8
        )
    return out


def verify(logits: Tensor, batch: VerifyBatch, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.verify`."""
    logits = logits.contiguous()
    num_accepted = torch.zeros(batch.num_requests, dtype=torch.long, device=logits.device)
    next_token = torch.full_like(num_accepted, -1)
    for group in batch.groups:
        _verify_group(logits, group, draws, num_accepted, next_token)
    return num_accepted, next_token


def _verify_group(
    logits: Tensor, group: RuleGroup, draws: Draws | None, num_accepted: Tensor, next_token: Tensor
) -> None:
    device, vocab = logits.device, logits.shape[1]
    num_rows, num_requests = len(group.request_of_row), len(group.requests)
    rows = torch.arange(num_rows, device=device) if group.logit_rows is None else group.logit_rows
    tile = min(VOCAB_TILE, power_of_two(vocab))
    stats = torch.empty((num_rows, 4), dtype=torch.float32, device=device)
    of, temperature = group.request_of_row, group.temperature
    if group.rule in (RULE_REJECTION, RULE_COUPLED):
        row_stats_kernel[num_rows,](
            logits, rows, of, temperature, group.top_p, group.top_k, stats, vocab,
            TRUNCATES=group.truncates, TILE=tile, num_warps=8,
        )  # fmt: skip
    width = group.draft_token_ids.shape[1]
    slots = power_of_two(width)
    if group.rule != RULE_REJECTION:
        emitted = torch.empty(num_rows, dtype=torch.long, device=device)
        emit_kernel[num_rows,](
            logits, rows, of, temperature, group.noise_key, group.decided_positions, stats,
            emitted, vocab, COUPLED=group.rule == RULE_COUPLED,
            TILE=min(COUPLED_TILE, power_of_two(vocab)), num_warps=8,
        )  # fmt: skip
        accept_equal_kernel[num_requests,](
            emitted, group.requests, group.row_start, group.verify_len, group.draft_token_ids,
            num_accepted, next_token, width, SLOTS=slots, num_warps=1,
        )  # fmt: skip
        return
    support = group.q_ids.shape[2]
    accept_u, sample_u = (stats, stats) if draws is None else draws
    accept_reject_kernel[num_requests,](
        logits, rows, group.requests, group.row_start, group.verify_len, group.draft_token_ids,
        group.q_ids, group.q_probs, group.decided_positions, group.noise_key, temperature,
        accept_u.contiguous(), sample_u.contiguous(), accept_u.shape[1], stats,
        num_accepted, next_token, width, support, vocab,
        SLOTS=slots, SUPPORT=power_of_two(support), HAS_DRAWS=draws is not None,
        TILE=min(1024, tile), num_warps=8,
    )  # fmt: skip
