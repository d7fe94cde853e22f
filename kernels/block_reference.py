"""Torch twin of block sampling, the drafter's decision: left to right with the Markov bias. CPU or CUDA, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.core.sampling import PURPOSE_DRAFT, RULE_COUPLED, RULE_GREEDY, SamplingBatch
from kernels.noise import exponential_noise, first_argmax, uniform
from kernels.reference import MIN_TEMPERATURE, inverse_cdf, largest, working_precision


class MarkovHead(NamedTuple):
    """The vanilla sequential head (paper Eq. 4-5): bias_k = W2 · W1[x_{k-1}]."""

    w1: Tensor  # [V, r] over the target's vocabulary
    w2: Tensor  # [V', r] over the draft vocabulary
    bias: Callable[[Tensor], Tensor] | None = None  # [N, r] -> [N, V'] by w2, laid out for a CPU


class DraftSampling(NamedTuple):
    """Sampling parameters of N requests on the drafter's device. Build with `DraftSampling.of`."""

    temperature: Tensor  # [N]
    top_p: Tensor  # [N]
    top_k: Tensor  # [N]
    noise_key: Tensor  # [N] int64
    rule: Tensor  # [N]
    all_greedy: bool
    any_coupled: bool
    any_truncated: bool

    @classmethod
    def of(cls, batch: SamplingBatch, device: torch.device | str = "cpu") -> DraftSampling:
        return cls(
            torch.from_numpy(batch.temperature).to(device),
            torch.from_numpy(batch.top_p).to(device),
            torch.from_numpy(batch.top_k.astype(np.int64)).to(device),
            torch.from_numpy(batch.noise_key.view(np.int64)).to(device),
            torch.from_numpy(batch.rule.astype(np.int64)).to(device),
            all_greedy=bool((batch.rule == RULE_GREEDY).all()),
            any_coupled=bool((batch.rule == RULE_COUPLED).any()),
            any_truncated=bool(((batch.top_p < 1.0) | (batch.top_k > 0)).any()),
        )

    def rows(self, chosen: Tensor) -> DraftSampling:
        """Of these of the requests [n]. What holds for all of them holds for any."""
        return self._replace(
            temperature=self.temperature[chosen],
            top_p=self.top_p[chosen],
            top_k=self.top_k[chosen],
            noise_key=self.noise_key[chosen],
            rule=self.rule[chosen],
        )


class BlockSample(NamedTuple):
    draft_token_ids: Tensor  # [N, gamma] int64, the target's ids
    q_ids: Tensor  # [N, gamma, draft_top_k] int64, most probable first; -1 pads
    q_probs: Tensor  # [N, gamma, draft_top_k] float32
    markov_embeddings: Tensor | None  # [N, gamma, r] W1[x_{k-1}], for the confidence head


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
    """Sample x_1..x_gamma left to right with the Markov bias (paper Eq. 4-6, C2), for N requests at once.

    Each slot samples from its corrected distribution restricted to the `draft_top_k` largest logits, with the
    request's temperature, top-k and top-p applied within that support; `q_probs` is exactly that distribution.
    Greedy rows take the argmax, with probability one in `q_probs[..., 0]` and padding after it. Coupled rows take
    the argmax of log q + g with the noise the target uses for that position.

    Args:
        base_logits: [N, gamma, V'] any float type.
        anchors: [N] ids in the target's vocabulary; anchor_positions: [N] their absolute positions.
        d2t: [V'] target id of each draft id; None when the vocabularies are the same.
        draws: [N, gamma] float64 uniforms that replace the keyed ones of rejection rows (tests enumerate them).
    """
    num_rows, gamma, vocab = base_logits.shape
    width = min(draft_top_k, vocab)
    device = base_logits.device
    q_ids = torch.full((num_rows, gamma, draft_top_k), -1, dtype=torch.long, device=device)
    q_probs = torch.zeros_like(q_ids, dtype=working_precision(base_logits[:0]).dtype)
    drafted = torch.empty((num_rows, gamma), dtype=torch.long, device=device)
    embeddings = []
    if draws is None:
        draws = draft_uniforms(sampling.noise_key, anchor_positions, gamma)
    previous = anchors.long()
    for k in range(gamma):
        logits = working_precision(base_logits[:, k])
        if markov is not None:
            embedding = markov.w1[previous]
            embeddings.append(embedding)
            bias = embedding @ markov.w2.T if markov.bias is None else markov.bias(embedding)
            logits = logits + bias.to(logits.dtype)
        if sampling.all_greedy:
            index = first_argmax(logits)[:, None]
            ids = index if d2t is None else d2t[index]
            probs = torch.ones_like(index, dtype=q_probs.dtype)
            previous = ids[:, 0]
        else:
            values, index = largest(logits, width)
            ids = index if d2t is None else d2t[index]
            probs = _support_probs(values, sampling)
            previous = _draw_from_support(
                ids, probs, sampling, anchor_positions + k + 1, draws[:, k]
            )
            ids = ids.masked_fill(
                (sampling.rule == RULE_GREEDY)[:, None] & (torch.arange(width, device=device) > 0),
                -1,
            )
        q_ids[:, k, : ids.shape[1]] = ids
        q_probs[:, k, : ids.shape[1]] = probs
        drafted[:, k] = previous
    return BlockSample(drafted, q_ids, q_probs, torch.stack(embeddings, 1) if embeddings else None)


def draft_uniforms(keys: Tensor, anchor_positions: Tensor, gamma: int) -> Tensor:
    """The keyed draws of rejection rows, [N, gamma].

    The slot is part of the purpose, so that a position drafted again in a later round gets a fresh draw: the first
    one has already shown in confidences that may have steered budgets since, and conditioned on them it is no longer
    uniform.
    """
    slots = torch.arange(gamma, device=keys.device)
    return uniform(keys[:, None], anchor_positions[:, None] + slots + 1, PURPOSE_DRAFT + slots)


def _support_probs(values: Tensor, sampling: DraftSampling) -> Tensor:
    """q over a support sorted by logit, [N, K] float32; one-hot for greedy rows."""
    greedy = (sampling.rule == RULE_GREEDY)[:, None]
    scale = sampling.temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    probs = torch.softmax((values - values[:, :1]) / scale, dim=-1)
    rank = torch.arange(values.shape[1], device=values.device)
    if sampling.any_truncated:
        limit = torch.where(sampling.top_k > 0, sampling.top_k, values.shape[1])[:, None]
        probs = probs.masked_fill(rank >= limit, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill((before >= sampling.top_p[:, None]) & (rank > 0), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.where(greedy, (rank == 0).to(probs.dtype), probs)


def _draw_from_support(
    ids: Tensor, probs: Tensor, sampling: DraftSampling, positions: Tensor, draws: Tensor
) -> Tensor:
    slot = inverse_cdf(probs, draws)
    if sampling.any_coupled:
        shared = (probs / exponential_noise(sampling.noise_key, positions, ids)).argmax(-1)
        slot = torch.where(sampling.rule == RULE_COUPLED, shared, slot)
    return ids.gather(1, slot[:, None])[:, 0]
