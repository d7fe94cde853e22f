"""Torch twins of the target's decisions: processed distributions and acceptance. CPU or CUDA, no Triton.

This is the specification. It also is the fast path on CPU, so nothing here loops over requests or tokens.

The *position* of a draw is the absolute position of the token it decides: the draft token x_k of a row whose anchor
sits at position a has position a + k, and so has the token the target puts there itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from actors.core.sampling import (
    PURPOSE_ACCEPT,
    PURPOSE_SAMPLE,
    RULE_GREEDY,
    RULE_REJECTION,
)
from kernels.noise import coupled_argmax, first_argmax, uniform

_BLOCK = 32  # candidates that share one maximum in `largest`
_SEARCH_WIDTHS = (128, 1024)  # tokens looked at before the whole row is
_SUM_BLOCK = 512
MIN_TEMPERATURE = 1e-5
MIN_RESIDUAL_MASS = 1e-8


def working_precision(x: Tensor) -> Tensor:
    """float32, except that float64 stays (exact tests)."""
    return x if x.dtype == torch.float64 else x.float()


# --- processed distributions ----------------------------------------------------------------------------------------


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, sorted: values and indices [n, k].

    The k largest lie in the k blocks with the largest maxima, so a wide row costs one pass and two short searches
    instead of a partial sort of all of it.
    """
    num_rows, width = x.shape
    if width <= 4 * k * _BLOCK or width % _BLOCK:
        return torch.topk(x, k, dim=-1)
    blocks = x.view(num_rows, width // _BLOCK, _BLOCK)
    chosen = torch.topk(blocks.amax(-1), k, dim=-1, sorted=False).indices.sort(dim=-1).values
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).view(num_rows, -1)
    values, index = torch.topk(candidates, k, dim=-1)
    return values, chosen.gather(1, index // _BLOCK) * _BLOCK + index % _BLOCK


def process_logits(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, *, truncates: bool = True
) -> Tensor:
    """The distributions that are served, [L, V]: temperature, then top-k, then top-p on what is left, renormalised.

    Tokens that tie with the last one kept are kept too, so the result does not depend on a sort order.

    Args:
        logits: [L, V]; computed in float32, or in float64 when given so. -inf forbids a token.
        temperature, top_p, top_k: [L]; temperature above zero (greedy rows want an argmax, not a distribution).
        truncates: False skips the search; right when no row has top_p < 1 or top_k > 0.
    """
    precise = logits if logits.dtype == torch.float64 else logits.float()
    probs = torch.softmax(
        precise / temperature.to(precise.dtype).clamp(min=MIN_TEMPERATURE)[:, None], dim=-1
    )
    if not truncates:
        return probs
    rows = torch.nonzero((top_p < 1.0) | (top_k > 0)).flatten()
    if rows.numel() == len(probs):
        return _truncate(probs, top_p, top_k)
    if rows.numel():
        probs[rows] = _truncate(probs[rows], top_p[rows], top_k[rows])
    return probs


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero what top-k and top-p exclude and renormalise. [n, V], [n], [n]."""
    vocab = probs.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    goal = torch.where(top_p >= 1.0, torch.inf, top_p.double())
    floor = torch.zeros_like(probs[:, 0])
    rows = torch.arange(len(probs), device=probs.device)
    for width in _SEARCH_WIDTHS:
        if not rows.numel():
            break
        found, known = _floor_of_largest(probs[rows], goal[rows], limit[rows], min(width, vocab))
        floor[rows] = found
        rows = rows[~known]
    if rows.numel():
        floor[rows] = _floor_by_halving(probs[rows], goal[rows], limit[rows])
    kept = probs.masked_fill(probs < floor[:, None], 0.0)
    return kept.div_(row_sum(kept)[:, None])


def _floor_of_largest(
    probs: Tensor, goal: Tensor, limit: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Probability [n] of the last token kept, judged from the `width` largest; and whether these were enough [n].

    goal: [n] share of the mass within top-k that must be reached, inf for all of it; limit: [n] tokens of top-k.
    """
    vocab = probs.shape[1]
    values, _ = largest(probs, width)
    within = torch.arange(width, device=probs.device) < limit[:, None]
    mass = (values.double() * within).cumsum(-1)
    whole = limit <= width
    total = torch.where(whole, mass[:, -1], 1.0)
    # Keep a token while the mass before it has not reached the goal: the smallest set that reaches it.
    before = mass - values.double() * within
    count = (within & (before < (goal * total)[:, None])).sum(-1).clamp(min=1)
    known = whole | ((limit == vocab) & (count < width))
    return values.gather(1, count[:, None] - 1)[:, 0], known


def _floor_by_halving(probs: Tensor, goal: Tensor, limit: Tensor) -> Tensor:
    """The same for any width, by halving the interval of float bit patterns: a flat distribution, kept by thousands."""
    ones = torch.ones_like(probs)
    floor = _largest_threshold(probs, ones, limit.double())
    within = probs.masked_fill(probs < floor[:, None], 0.0)
    return torch.maximum(floor, _largest_threshold(within, within, goal * row_sum(within).double()))


def _largest_threshold(values: Tensor, weights: Tensor, goal: Tensor) -> Tensor:
    """Largest t for which the weights of values >= t sum up to the goal [n]; 0 where no t does. Values are >= 0.

    Non-negative floats are ordered like their bit patterns, so integers are halved and the result is exact.
    """
    bits = torch.int64 if values.dtype == torch.float64 else torch.int32
    low = torch.zeros(len(values), dtype=bits, device=values.device)
    high = torch.full_like(low, int(torch.ones((), dtype=values.dtype).view(bits)) + 1)
    for _ in range(int(high[0]).bit_length()):
        middle = low + (high - low) // 2
        reached = row_sum(torch.where(values >= middle.view(values.dtype)[:, None], weights, 0.0))
        enough = reached.double() >= goal
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(values.dtype)


def row_sum(x: Tensor) -> Tensor:
    """Sum of each row [n, m], bit for bit the same for a row alone and in a batch, with any number of threads.

    torch splits one long row between threads but not many rows; sums of blocks are short enough for one thread.
    """
    whole = x.shape[1] // _SUM_BLOCK * _SUM_BLOCK
    blocks: Tensor = x[:, :whole].unflatten(1, (-1, _SUM_BLOCK)).sum(-1).sum(-1)
    return blocks + x[:, whole:].sum(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """First index whose cumulated weight exceeds u * total. [n, m], [n] float64 in (0, 1) → [n].

    So the outcome as a function of u is a step function with its steps at cumsum(weights) / total.
    """
    cumulated = weights.double().cumsum(-1)
    return torch.searchsorted(cumulated, (u * cumulated[:, -1])[:, None], right=True)[:, 0]


# --- the target's side ----------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """Uniforms that replace the keyed ones of rejection rows, float64, so that tests can enumerate them."""

    accept: Tensor  # [R, max_verify_len]
    sample: Tensor  # [R]


class RuleGroup(NamedTuple):
    """The requests of a step that share an acceptance rule. r requests, l rows of logits, W the longest verify_len."""

    rule: int
    requests: Tensor  # [r] row of the step plan
    logit_rows: (
        Tensor | None
    )  # [l] this group's rows among the logits; None when they are all of them
    row_start: Tensor  # [r] first of the request's 1 + verify_len rows, within the group
    request_of_row: Tensor  # [l] index within the group
    decided_positions: Tensor  # [l] absolute position of the token each row decides
    verify_len: Tensor  # [r]
    draft_token_ids: Tensor  # [r, W] -1 pads
    q_ids: Tensor  # [r, W, K] -1 pads
    q_probs: Tensor  # [r, W, K]
    temperature: Tensor  # [r]
    top_p: Tensor  # [r]
    top_k: Tensor  # [r]
    noise_key: Tensor  # [r] int64
    truncates: bool


class VerifyBatch(NamedTuple):
    """What acceptance needs to know of a `StepPlan`, on the device. Build with `kernels.rejection.verify_batch`."""

    num_requests: int  # rows of the step plan
    token_rows: Tensor  # [L] flattened tokens whose logits are needed, request after request
    groups: tuple[RuleGroup, ...]


def verify(logits: Tensor, batch: VerifyBatch, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
    """Apply each request's acceptance rule (C1; paper section 2.1).

    rejection: accept x_k with min(1, p(x_k) / q(x_k)); after the first rejection sample norm(max(p - q, 0)); after
    the last scheduled slot sample p, whatever the drafter proposed beyond it.
    coupled: the token of a position is argmax(log p + g); a draft token is accepted iff it equals it. greedy: same
    with the argmax of the logits.

    Args:
        logits: [L, V] of the flattened tokens `batch.token_rows`.

    Returns:
        num_accepted [R] int64 and next_token [R] int64; 0 and -1 where the plan row does not sample.
    """
    num_accepted = torch.zeros(batch.num_requests, dtype=torch.long, device=logits.device)
    next_token = torch.full_like(num_accepted, -1)
    for group in batch.groups:
        own = logits if group.logit_rows is None else logits[group.logit_rows]
        if group.rule == RULE_REJECTION:
            accepted, token = _verify_rejection(own, group, draws)
        else:
            accepted, token = _verify_equality(_emitted(own, group), group)
        num_accepted[group.requests] = accepted
        next_token[group.requests] = token
    return num_accepted, next_token


def _probs(logits: Tensor, group: RuleGroup) -> Tensor:
    of = group.request_of_row
    return process_logits(
        logits, group.temperature[of], group.top_p[of], group.top_k[of], truncates=group.truncates
    )


def _emitted(logits: Tensor, group: RuleGroup) -> Tensor:
    """The token each row emits under a rule that needs no fresh randomness, [l]."""
    if group.rule == RULE_GREEDY:
        return first_argmax(logits)
    return coupled_argmax(
        _probs(logits, group), group.noise_key[group.request_of_row], group.decided_positions
    )


def _verify_equality(emitted: Tensor, group: RuleGroup) -> tuple[Tensor, Tensor]:
    slots = torch.arange(group.draft_token_ids.shape[1], device=emitted.device)
    scheduled = slots < group.verify_len[:, None]
    rows = (group.row_start[:, None] + slots).clamp(max=len(emitted) - 1)
    accepted = _leading_run((emitted[rows] == group.draft_token_ids) & scheduled)
    return accepted, emitted[group.row_start + accepted]


def _verify_rejection(
    logits: Tensor, group: RuleGroup, draws: Draws | None
) -> tuple[Tensor, Tensor]:
    probs = _probs(logits, group)
    slots = torch.arange(group.draft_token_ids.shape[1], device=logits.device)
    scheduled = slots < group.verify_len[:, None]
    rows = (group.row_start[:, None] + slots).clamp(max=len(probs) - 1)
    if draws is None:
        accept_u = uniform(group.noise_key[:, None], group.decided_positions[rows], PURPOSE_ACCEPT)
    else:
        accept_u = draws.accept[group.requests][:, : len(slots)]
    drafted = group.draft_token_ids
    p = probs[rows, drafted.clamp(min=0)]
    q = (group.q_probs * (group.q_ids == drafted[..., None])).sum(-1)
    accepted = _leading_run((accept_u * q < p) & (q > 0) & scheduled)
    # The row after the accepted run: p there is the plain target law, or the residual where a draft was refused.
    last = group.row_start + accepted
    weights = probs[last]
    if len(slots):
        weights = _residual(weights, accepted, group)
    if draws is None:
        sample_u = uniform(group.noise_key, group.decided_positions[last], PURPOSE_SAMPLE)
    else:
        sample_u = draws.sample[group.requests]
    return accepted, inverse_cdf(weights, sample_u)


def _residual(target: Tensor, accepted: Tensor, group: RuleGroup) -> Tensor:
    """max(p - q, 0) for requests whose run ended in a rejection, p for the others. [r, V], unnormalised."""
    slot = accepted.clamp(max=group.draft_token_ids.shape[1] - 1)[:, None, None].expand(
        -1, 1, group.q_ids.shape[2]
    )
    q_ids, q_probs = group.q_ids.gather(1, slot)[:, 0], group.q_probs.gather(1, slot)[:, 0]
    refused = (accepted < group.verify_len)[:, None]
    q_probs = torch.where(refused & (q_ids >= 0), q_probs, 0.0).to(target.dtype)
    residual = target.scatter_add(1, q_ids.clamp(min=0), -q_probs).clamp_(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > MIN_RESIDUAL_MASS, residual, target)


def _leading_run(accept: Tensor) -> Tensor:
    return accept.long().cumprod(-1).sum(-1)
