"""Exact output laws of drafting, scheduling and verifying on a tiny vocabulary, through the real functions.

The functions are black boxes of the uniforms they draw. Every draw cuts [0, 1) into intervals with one outcome each;
the cuts are found by bisection, so an interval's length is that outcome's probability, and nothing about the rules is
assumed but that outcomes are ordered in the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.layout import DraftTokens, SpecialRow, StepPlan
from actors.core.logit_edits import LogitEdits, logit_edits
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.grammars import TokenMasks
from kernels import block_reference, reference
from kernels.block_reference import DraftSampling
from kernels.logit_edits import edit_logits, mask_logits
from kernels.reference import Draws
from kernels.rejection import verify_batch
from tests.torch_cpu.tiny_pair import STOPS, TinyPair, rest_law

Float64 = npt.NDArray[np.float64]
Scheduler = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.int32]]
"""Survivals [R, gamma] of one step to verify_len [R]."""

ANCHOR_POSITION = 5
_HALVINGS = 50


@dataclass(frozen=True)
class Code:
    """The functions under test; mutants replace them."""

    sample_block: Callable[..., block_reference.BlockSample] = block_reference.sample_block
    verify: Callable[..., tuple[Tensor, Tensor]] = reference.verify
    logit_edits: Callable[[StepPlan], LogitEdits | None] = logit_edits
    masks: Callable[[StepPlan], TokenMasks | None] = lambda _: None


def cuts(outcome: Callable[[Tensor], Tensor], num_rows: int, num_outcomes: int) -> Float64:
    """Interval ends [num_rows, num_outcomes + 1] of outcomes ordered in a draw.

    `outcome` maps draws [num_rows, num_outcomes - 1] (one column an end that is looked for) to outcomes.
    """
    low = torch.zeros(num_rows, num_outcomes - 1, dtype=torch.float64)
    high = torch.ones_like(low)
    limit = torch.arange(num_outcomes - 1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = outcome(middle) <= limit
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    ends = np.concatenate([np.zeros((num_rows, 1)), high.numpy(), np.ones((num_rows, 1))], axis=1)
    ends[ends > 1 - 2.0**-40] = 1.0
    ends[ends < 2.0**-40] = 0.0
    return ends


@dataclass(frozen=True)
class Drafted:
    """Every block a drafter can propose, with its probability. P paths."""

    probability: Float64  # [P]
    tokens: npt.NDArray[np.int64]  # [P, gamma]
    q_ids: npt.NDArray[np.int64]  # [P, gamma, K]
    q_probs: npt.NDArray[np.floating]  # [P, gamma, K]


def drafted(
    code: Code, pair: TinyPair, anchor: int, params: SamplingParams, draft_top_k: int
) -> Drafted:
    """Enumerate the drafter's block slot by slot."""

    def sample(draws: Tensor) -> block_reference.BlockSample:
        n = len(draws)
        return code.sample_block(
            pair.base[None].expand(n, -1, -1),
            pair.markov,
            torch.full((n,), anchor),
            torch.full((n,), ANCHOR_POSITION),
            DraftSampling.of(SamplingBatch.of([params] * n)),
            draft_top_k,
            pair.d2t,
            draws,
        )

    draws = torch.full((1, pair.gamma), 0.5, dtype=torch.float64)
    probability = np.ones(1)
    for k in range(pair.gamma):

        def slot_of(u: Tensor, k: int = k, draws: Tensor = draws) -> Tensor:
            tried = draws.repeat_interleave(u.shape[1], 0)
            tried[:, k] = u.flatten()
            block = sample(tried)
            slot = (block.q_ids[:, k] == block.draft_token_ids[:, k, None]).long().argmax(-1)
            return slot.view(u.shape)

        ends = cuts(slot_of, len(draws), draft_top_k)
        width = np.diff(ends, axis=1)
        path, slot = np.nonzero(width > 0)
        draws = draws[path].clone()
        draws[:, k] = torch.from_numpy((ends[path, slot] + ends[path, slot + 1]) / 2)
        probability = probability[path] * width[path, slot]
    block = sample(draws)
    return Drafted(
        probability, block.draft_token_ids.numpy(), block.q_ids.numpy(), block.q_probs.numpy()
    )


def commit_laws(
    code: Code, pair: TinyPair, anchor: int, params: SamplingParams, blocks: Drafted
) -> Float64:
    """P(the round accepts `count` slots and then commits `token`), [P, verify_len, count, token].

    Both middle axes go from 0 to gamma; the accepted tokens are the block's own.
    """
    gamma, vocab = pair.gamma, pair.vocab
    law = np.zeros((len(blocks.tokens), gamma + 1, gamma + 1, vocab))
    for verify_len in range(gamma + 1):
        bounds = _accept_bounds(code, pair, anchor, params, blocks, verify_len)
        for accepts in product((True, False), repeat=verify_len):
            chance = np.where(accepts, bounds, 1 - bounds).prod(axis=1)
            if not chance.any():
                continue
            draws = np.where(accepts, bounds / 2, (1 + bounds) / 2)
            run = _verifier(code, pair, anchor, params, blocks, verify_len, vocab - 1)
            accepted, next_law = _next_token_law(run, draws, vocab)
            paths = np.arange(len(chance))
            law[paths, verify_len, accepted] += chance[:, None] * next_law
    return law


def round_laws(
    code: Code, pair: TinyPair, anchor: int, params: SamplingParams, blocks: Drafted
) -> Float64:
    """Law of the next gamma + 1 tokens for every block and verify_len, [P, gamma + 1, V, V, ...].

    What the round does not commit follows the target's own law, as later rounds will.
    """
    gamma, vocab = pair.gamma, pair.vocab
    rest = cache(lambda tokens: rest_law(pair, tokens, params))
    commits = commit_laws(code, pair, anchor, params, blocks)
    law = np.zeros((len(blocks.tokens), gamma + 1, *[vocab] * (gamma + 1)))
    for path, verify_len, count, token in np.argwhere(commits):
        committed = (*blocks.tokens[path, :count].tolist(), int(token))
        chance = commits[path, verify_len, count, token]
        law[path, verify_len, *committed] += chance * rest((anchor, *committed))
    return law


def _accept_bounds(
    code: Code,
    pair: TinyPair,
    anchor: int,
    params: SamplingParams,
    blocks: Drafted,
    verify_len: int,
) -> Float64:
    """P(slot k accepted | the ones before it were), [P, verify_len]."""
    num_paths = len(blocks.tokens)
    run = _verifier(code, pair, anchor, params, blocks, verify_len, 1)
    bounds = np.zeros((num_paths, verify_len))
    for k in range(verify_len):
        accept = torch.from_numpy(bounds / 2)

        def refused(u: Tensor, k: int = k, accept: Tensor = accept) -> Tensor:
            tried = accept.clone()
            tried[:, k] = u[:, 0]
            accepted, _ = run(tried, torch.full((num_paths,), 0.5, dtype=torch.float64))
            return (accepted <= k).long()[:, None]

        bounds[:, k] = _first_cut(refused, num_paths, accept, k)
    return bounds


def _first_cut(
    refused: Callable[[Tensor], Tensor], num_rows: int, accept: Tensor, k: int
) -> Float64:
    # While slot k is bisected, the slots after it must not look accepted: their draw is 1 - tiny.
    accept[:, k + 1 :] = 1 - 2.0**-45
    return cuts(refused, num_rows, 2)[:, 1]


def _next_token_law(
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], accept: Float64, vocab: int
) -> tuple[npt.NDArray[np.int64], Float64]:
    """Accepted tokens [P] and the law [P, V] of the token after them, for given acceptance draws [P, verify_len]."""
    accept_draws = torch.from_numpy(accept).repeat_interleave(vocab - 1, 0)
    accepted, _ = run(accept_draws, torch.full((len(accept_draws),), 0.5, dtype=torch.float64))

    def token_of(u: Tensor) -> Tensor:
        _, token = run(accept_draws, u.flatten())
        return token.view(u.shape)

    return accepted[:: vocab - 1].numpy(), np.diff(cuts(token_of, len(accept), vocab), axis=1)


def _verifier(
    code: Code,
    pair: TinyPair,
    anchor: int,
    params: SamplingParams,
    blocks: Drafted,
    verify_len: int,
    copies: int,
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A function of (accept draws, sample draws) that verifies every block `copies` times in one ragged batch."""
    # One more request with a full block goes first, so that the batch is ragged and rows are offset.
    paths = np.concatenate([[0], np.repeat(np.arange(len(blocks.tokens)), copies)])
    lens = np.full(len(paths), verify_len)
    lens[0] = pair.gamma
    query = np.concatenate([np.full((len(paths), 1), anchor), blocks.tokens[paths]], axis=1)
    slots = np.arange(pair.gamma + 1)
    used = slots <= lens[:, None]
    plan = StepPlan(
        step=7,
        request_ids=tuple(str(row) for row in range(len(paths))),
        token_ids=query[used].astype(np.int32),
        positions=(ANCHOR_POSITION + np.broadcast_to(slots, used.shape)[used]).astype(np.int32),
        cu_query_len=np.concatenate([[0], np.cumsum(lens + 1)]).astype(np.int32),
        context_len=np.zeros(len(paths), np.int32),
        block_tables=np.zeros((len(paths), 1), np.int32),
        slot_mapping=np.zeros(used.sum(), np.int32),
        verify_len=lens.astype(np.int32),
        samples=np.ones(len(paths), np.bool_),
        sampling=SamplingBatch.of([params] * len(paths)),
        draft=DraftTokens(blocks.q_ids[paths].astype(np.int32), blocks.q_probs[paths]),
        special=_special_rows(params, anchor, len(paths)),
    )
    batch = verify_batch(plan)
    logits = _shaped_logits(code, pair, plan)

    def run(accept: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        draws = Draws(
            torch.full((len(paths), pair.gamma), 0.5).double(),
            torch.full((len(paths),), 0.5).double(),
        )
        draws.accept[1:, :verify_len] = accept
        draws.sample[1:] = sample
        accepted, token = code.verify(logits, batch, draws)
        return accepted[1:], token[1:]

    return run


def _shaped_logits(code: Code, pair: TinyPair, plan: StepPlan) -> Tensor:
    """The target's logits of every token of the plan, with the rules of its rows applied."""
    logits = pair.target[plan.positions - ANCHOR_POSITION, plan.token_ids.astype(np.int64)]
    edits = code.logit_edits(plan)
    if edits is not None:
        edit_logits(logits, edits)
    masks = code.masks(plan)
    if masks is not None:
        assert not masks.errors
        mask_logits(logits, masks.rows, masks.bits)
    return logits


def _special_rows(params: SamplingParams, anchor: int, count: int) -> tuple[SpecialRow, ...]:
    """Requests whose prompt is the anchor."""
    if not params.is_special:
        return ()
    prompt = np.array([anchor], np.int32)
    return tuple(SpecialRow(row, str(row), 0, params, prompt, 0, STOPS) for row in range(count))


def output_law(
    blocks: list[Drafted],
    laws: list[Float64],
    survival: list[npt.NDArray[np.float32]],
    schedule: Scheduler,
) -> list[Float64]:
    """Law of each request's next tokens when one scheduler decides over all requests' blocks of a step."""
    total = [np.zeros(law.shape[2:]) for law in laws]
    for paths in product(*[range(len(each.tokens)) for each in blocks]):
        chance = np.prod([each.probability[path] for each, path in zip(blocks, paths, strict=True)])
        lens = schedule(np.stack([a[path] for a, path in zip(survival, paths, strict=True)]))
        for request, (path, verify_len) in enumerate(zip(paths, lens, strict=True)):
            total[request] += chance * laws[request][path, verify_len]
    return total


def total_variation(a: Float64, b: Float64) -> float:
    return float(0.5 * np.abs(a - b).sum())
