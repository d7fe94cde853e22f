"""Blocks drafted no further than they are worth: behind its stop a slot costs no output head and no sampling.

A confidence reads the hidden state of its slot and the token before (paper Eq. 7-8), so it is known before the slot's
logits are. Logits are computed for groups of slots of those rows that still go on: a product for a single slot would
cost its weights' way through the memory, whatever it has for rows.

What stands in for an undrafted slot is a proposal all the same, its token with probability one: verifying it would keep
the law (see `actors.core.draft_stop`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from actors.core.draft_stop import LEAST_DRAFTED
from actors.engine.drafters.drafted import DraftedBlock
from kernels.block_reference import draft_uniforms
from kernels.markov_sample import DraftSampling, MarkovHead, sample_block
from kernels.reference import working_precision

GROUP_ROWS = 48  # of a product: fewer cost as much, as the weights have to be read


class Slots(Protocol):
    """Slots of N blocks, computed as they are asked for: in order, and only for rows [n] that were asked for before."""

    def logits(self, rows: Tensor, start: int, end: int) -> Tensor:
        """Base logits [n, end - start, V'] of these slots."""

    def confidences(self, rows: Tensor, slot: int, previous: Tensor) -> Tensor:
        """Calibrated confidences [n] of a slot whose logits were computed, after the tokens `previous` [n]."""


def draft_while_worth(
    slots: Slots,
    markov: MarkovHead | None,
    anchor_ids: Tensor,
    anchors: Tensor,
    sampling: DraftSampling,
    stops: Tensor,
    gamma: int,
    draft_top_k: int,
    draft_ids: Tensor | None = None,
    draws: Tensor | None = None,
) -> DraftedBlock:
    """Draw as `sample_block` does, from left to right while the survival of a slot is at least stops [N].

    The first `LEAST_DRAFTED` slots are drawn in any case. Arguments as for `sample_block`.
    """
    if draws is None:
        draws = draft_uniforms(sampling.noise_key, anchors, gamma)
    rows = at = torch.arange(len(anchors), device=anchors.device)  # that go on; where in the group
    previous, survival, own = anchor_ids.long(), torch.ones_like(stops), sampling
    start, end = 0, group_len(len(rows), gamma)
    base = slots.logits(rows, start, end)
    block = _fillers(anchor_ids, gamma, draft_top_k, working_precision(base[:0]).dtype)
    assert block.draft_lens is not None
    for slot in range(gamma):
        if slot == end:
            start, end = slot, slot + group_len(len(rows), gamma - slot)
            base, at = slots.logits(rows, start, end), torch.arange(len(rows), device=rows.device)
        confidences = slots.confidences(rows, slot, previous)
        survival = survival * confidences
        goes_on = (survival >= stops[rows]) | (slot < LEAST_DRAFTED)
        if not goes_on.all():
            rows, at, previous, survival, confidences = (
                t[goes_on] for t in (rows, at, previous, survival, confidences)
            )
            if not len(rows):
                break
            own = sampling.rows(rows)
        logits = working_precision(base[at, slot - start])
        if markov is not None:
            logits = logits + _bias(markov, previous).to(logits.dtype)
        drawn = sample_block(
            logits[:, None], None, previous, anchors[rows] + slot, own, draft_top_k, draft_ids,
            draws[rows, slot, None],
        )  # fmt: skip
        previous = drawn.draft_token_ids[:, 0]
        block.draft_token_ids[rows, slot] = previous
        block.confidences[rows, slot] = confidences
        block.q_ids[rows, slot] = drawn.q_ids[:, 0]
        block.q_probs[rows, slot] = drawn.q_probs[:, 0]
        block.draft_lens[rows] += 1
    return block


def group_len(num_rows: int, num_left: int) -> int:
    """How many of the slots that are left to compute at once for so many rows: groups alike, of about GROUP_ROWS."""
    num_groups = max(1, round(num_rows * num_left / GROUP_ROWS))
    return -(-num_left // num_groups)


def _fillers(anchor_ids: Tensor, gamma: int, draft_top_k: int, dtype: torch.dtype) -> DraftedBlock:
    """Blocks nobody drafted: a token of the vocabulary, and q one-hot on it."""
    count, device = len(anchor_ids), anchor_ids.device
    tokens = anchor_ids.long()[:, None].repeat(1, gamma)
    q_ids = torch.full((count, gamma, draft_top_k), -1, dtype=torch.long, device=device)
    q_probs = torch.zeros((count, gamma, draft_top_k), dtype=dtype, device=device)
    q_ids[..., 0], q_probs[..., 0] = tokens, 1.0
    lens = torch.zeros(count, dtype=torch.long, device=device)
    return DraftedBlock(tokens, torch.zeros((count, gamma), device=device), q_ids, q_probs, lens)


def _bias(markov: MarkovHead, previous: Tensor) -> Tensor:
    embedding = markov.w1[previous]
    return embedding @ markov.w2.T if markov.bias is None else markov.bias(embedding)
