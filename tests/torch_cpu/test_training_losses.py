"""The fused loss against autograd."""

from __future__ import annotations

import pytest
import torch

from actors.engine.training import losses
from actors.engine.training.losses import Labels, LossWeights, block_loss, confidence_loss

M, D, R, V, OUTSIDE = 11, 16, 4, 50, 30


@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize(
    "weights",
    [
        LossWeights(),
        LossWeights(ce=1, tv=0),
        LossWeights(ce=0, tv=1),
        LossWeights(0.2, 0.3, 1, 0.5),
    ],
)
def test_fused_loss_and_gradients_equal_autograd(
    weights: LossWeights, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    hidden, rows, w2 = (torch.randn(s, requires_grad=True) for s in ((M, D), (M, R), (V, R)))
    head, rest, teacher = torch.randn(V, D), torch.randn(OUTSIDE, D), torch.randn(M, D)
    lse = torch.cat((teacher @ head.T, teacher @ rest.T), 1).logsumexp(-1)
    ids, slot = torch.randint(-1, V, (M,)), torch.rand(M)
    share = slot / slot.sum()
    fused = block_loss(hidden, rows, w2, head, Labels(ids, teacher, lse, share), weights)
    fused.total.backward()
    ours = [t.grad for t in (hidden, rows, w2)]

    copies = [t.detach().clone().requires_grad_() for t in (hidden, rows, w2)]
    h, e, w = copies
    log_p = (h @ head.T + e @ w.T).log_softmax(-1)
    p, t = log_p.exp(), (teacher @ head.T - lse[:, None]).exp()
    ce = torch.where(ids >= 0, -log_p.gather(1, ids.clamp_min(0)[:, None])[:, 0], 0.0)
    tv = (p - t).abs().sum(-1) + 1 - t.sum(-1)
    distill = -(t * log_p).sum(-1)
    each = weights.ce * ce + weights.tv * tv + weights.distill * distill
    (each * share).sum().backward()
    torch.testing.assert_close(fused.total, (each * share).sum())
    torch.testing.assert_close(fused.accept, 1 - tv.detach() / 2)
    for grad, copy in zip(ours, copies, strict=True):
        torch.testing.assert_close(grad, copy.grad, atol=1e-5, rtol=1e-4)


def test_slots_without_weight_do_not_count() -> None:
    torch.manual_seed(0)
    hidden, rows, w2, head = (torch.randn(s) for s in ((M, D), (M, R), (V, R), (V, D)))
    slot = torch.ones(M)
    slot[5:] = 0
    ids = torch.randint(0, V, (M,))
    labels = Labels(ids, torch.randn(M, D), torch.full((M,), 9.0), slot)
    whole = block_loss(hidden, rows, w2, head, labels, LossWeights())
    kept = Labels(ids[:5], labels.teacher_hidden[:5], labels.teacher_lse[:5], slot[:5])
    part = block_loss(hidden[:5], rows[:5], w2, head, kept, LossWeights())
    torch.testing.assert_close(whole.total, part.total)


def test_later_slots_weigh_less_as_in_the_paper() -> None:
    assert LossWeights(decay=4.0).slots(3).tolist() == pytest.approx([1, 0.7788, 0.6065], abs=1e-4)


def test_confidence_learns_the_analytic_acceptance() -> None:
    logits = torch.zeros(2, requires_grad=True)
    accept = torch.tensor([0.25, 0.75])
    for _ in range(400):
        (grad,) = torch.autograd.grad(
            confidence_loss(logits, accept, torch.full((2,), 0.5)), logits
        )
        logits = (logits - 10 * grad).detach().requires_grad_()
    torch.testing.assert_close(logits.sigmoid().detach(), accept, atol=1e-3, rtol=0)
