"""The objective of every kind of drafter (spec 2.1, 9.1, 9.2), fused over the draft vocabulary.

The gradient of every term with respect to the logits has a closed form, so rows are handled in
chunks that stay in cache and no [rows, vocabulary] tensor outlives its chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from actors.engine.drafters.config import Kind

CHUNK_ROWS = 256
EAGLE3_STEP_DECAY = 0.8

Weighting = Literal["paper", "code", "blend"]
WEIGHTINGS: tuple[Weighting, ...] = ("paper", "code", "blend")


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms and the decay of later slots, w_j = exp(-j / decay)."""

    ce: float = 0.1  # hard label: the token of the text
    tv: float = 0.9  # L1 distance to the target's distribution at temperature 1
    confidence: float = 1.0
    distill: float = 0.0  # cross entropy to the target's distribution (this project's addition)
    decay: float = 4.0

    def slots(self, gamma: int) -> Tensor:
        """Return w [gamma]."""
        return torch.exp(-torch.arange(gamma) / self.decay)


def weights_for(kind: Kind, weighting: Weighting, gamma: int) -> LossWeights:
    """Return the loss of a kind of drafter.

    `paper` decays slots by exp(-j / gamma), `code` (DeepSpec) by exp(-j / 4): the two disagree (spec 11). DSpark:
    0.1 CE + 0.9 TV + confidence; `blend` is this project's own mix of them with distillation, at DeepSpec's decay.
    DFlash: CE. EAGLE-3: cross entropy to the target's distribution, 0.8 ** j whatever the weighting. MTP: CE + TV.
    """
    decay = float(gamma) if weighting == "paper" else 4.0
    if kind == "dflash":
        return LossWeights(ce=1.0, tv=0.0, confidence=0.0, decay=decay)
    if kind == "eagle3":
        return LossWeights(
            ce=0.0, tv=0.0, confidence=0.0, distill=1.0, decay=-1 / math.log(EAGLE3_STEP_DECAY)
        )
    if kind == "mtp":
        return LossWeights(confidence=0.0, decay=decay)
    if weighting == "blend":
        return LossWeights(ce=0.3, tv=0.3, confidence=0.3, distill=0.7, decay=decay)
    return LossWeights(decay=decay)


@dataclass(frozen=True)
class Labels:
    """What M slots should predict."""

    draft_ids: Tensor  # [M] index into the draft vocabulary, -1 when the token is not in it
    teacher_hidden: Tensor  # [M, d] the target's normed hidden state that predicts the label
    teacher_lse: Tensor  # [M] log-normaliser of the target over the full vocabulary
    weights: (
        Tensor  # [M] share of the mean over the step; they sum to one over all trainers of a step
    )


@dataclass(frozen=True)
class BlockLoss:
    """Scalar terms, weighted sums over the slots, and per-slot measurements."""

    total: Tensor
    ce: Tensor
    tv: Tensor
    distill: Tensor
    accept: Tensor  # [M] 1 - TV distance: the analytic acceptance probability
    agree: Tensor  # [M] bool, the draft's argmax is the label


def block_loss(
    hidden: Tensor, codes: Tensor, w2: Tensor, head: Tensor, labels: Labels, weights: LossWeights
) -> BlockLoss:
    """Return the vocabulary terms for hidden [M, d], codes [M, r], w2 [Vd, r], head [Vd, d].

    Codes are 0 wide where the drafter has no sequential head.
    `head` is frozen and serves draft and teacher. Probability the target puts outside the draft
    vocabulary counts as distance. Gradients flow into hidden, codes and w2.
    """
    parts = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        hidden, codes, w2, head, labels, weights
    )
    return BlockLoss(*parts)


def confidence_loss(logits: Tensor, accept: Tensor, weights: Tensor) -> Tensor:
    """Binary cross entropy of confidence logits [M] against the analytic acceptance [M]."""
    each = F.binary_cross_entropy_with_logits(logits, accept.detach(), reduction="none")
    return (each * weights).sum()


class _VocabularyLoss(torch.autograd.Function):
    """Loss and gradient in one pass; backward only scales what forward kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        codes: Tensor,
        w2: Tensor,
        head: Tensor,
        labels: Labels,
        weights: LossWeights,
    ) -> tuple[Tensor, ...]:
        compute = head.dtype
        h, e, m2 = hidden.to(compute), codes.to(compute), w2.to(compute)
        grad_h, grad_e = torch.empty_like(h), torch.empty_like(e)
        grad_w2 = torch.zeros(w2.shape, dtype=torch.float32)
        sums = torch.zeros(3)
        accept = torch.empty(len(h))
        agree = torch.empty(len(h), dtype=torch.bool)
        for at in range(0, len(h), CHUNK_ROWS):
            part = slice(at, at + CHUNK_ROWS)
            logits = (h[part] @ head.T).float()
            if e.shape[1]:
                logits += (e[part] @ m2.T).float()
            teacher = (labels.teacher_hidden[part].to(compute) @ head.T).float()
            teacher = teacher.sub_(labels.teacher_lse[part, None]).exp_()
            agree[part] = logits.argmax(-1) == labels.draft_ids[part]
            grad, terms, accept[part] = _chunk(
                logits, teacher, labels.draft_ids[part], labels.weights[part], weights
            )
            sums += terms
            grad = grad.to(compute)
            grad_h[part] = grad @ head
            grad_e[part] = grad @ m2
            grad_w2 += (grad.T @ e[part]).float()
        ctx.save_for_backward(grad_h.to(hidden.dtype), grad_e.to(codes.dtype), grad_w2.to(w2.dtype))
        ctx.mark_non_differentiable(accept, agree)
        ce, tv, distill = sums.unbind()
        total = weights.ce * ce + weights.tv * tv + weights.distill * distill
        return total, ce, tv, distill, accept, agree

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_ignored: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_e, grad_w2 = ctx.saved_tensors
        return grad_h * scale, grad_e * scale, grad_w2 * scale, None, None, None


def _chunk(
    logits: Tensor, teacher: Tensor, ids: Tensor, share: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (d loss / d logits [C, Vd], the three summed terms, acceptance [C])."""
    known = ids >= 0
    safe = ids.clamp_min(0)[:, None]
    log_z = logits.logsumexp(-1, keepdim=True)
    inside = teacher.sum(-1, keepdim=True)
    cross = inside[:, 0] * log_z[:, 0] - (teacher * logits).sum(-1)
    ce = torch.where(known, log_z[:, 0] - logits.gather(1, safe)[:, 0], 0.0)
    draft = logits.sub_(log_z).exp_()
    gap = draft - teacher
    distance = gap.abs().sum(-1) + (1 - inside[:, 0]).clamp_min(0)
    sign = gap.sign_()
    tilt = (draft * sign).sum(-1, keepdim=True)
    hard = torch.where(known, weights.ce, 0.0)[:, None]
    # d CE = p - onehot; d distill = p * sum(t) - t; d L1 = p * (s - sum p s)
    grad = sign.sub_(tilt).mul_(weights.tv).add_(hard + weights.distill * inside).mul_(draft)
    grad.sub_(teacher, alpha=weights.distill)
    grad.scatter_add_(1, safe, -hard)
    grad.mul_(share[:, None])
    terms = torch.stack(((ce * share).sum(), (distance * share).sum(), (cross * share).sum()))
    return grad, terms, 1 - distance / 2
