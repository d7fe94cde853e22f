"""What becomes of a draft token when the text that decoding commits is known already.

Speculative decoding commits text of the target's own law, whatever the drafter says (C1). So rounds need no decoding:
given recorded text of that law, the law of every acceptance follows from p and q alone, slot by slot, and the text
after a slot says nothing more about it (whether accepted or not, what follows is drawn from p).

*greedy.* A draft token is accepted when it equals the text.

*rejection* (paper section 2.1). A draft x ~ q is accepted with min(1, p(x) / q(x)), so P(accepted, output y) =
min(p(y), q(y)); the output alone has P(output y) = p(y). Hence, given the text's y,
    P(accepted | y) = min(1, q(y) / p(y)).
A refused draft was x with probability in proportion to q(x) - min(p(x), q(x)), independent of the recovered y.

*coupled.* Target and drafter share Gumbel noise g of the position: y = argmax(log p + g), the draft is
argmax(log q + g). Given y, the maximum's e^{-max} = E_0 and the other tokens' slacks E_j are independent
exponentials, and e^{-g_y} = p(y) E_0, e^{-g_j} = p(j) E_0 + E_j. The draft is the j that minimises e^{-g_j} / q(j), so
    P(accepted | y) = P(E_j > E_0 (q(j) p(y) / q(y) - p(j)) for all j)
                    = 1 / (1 + sum_j max(0, q(j) p(y) / q(y) - p(j))).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["greedy", "rejection", "coupled"]


class Slot(NamedTuple):
    """One slot of N blocks over the K tokens its draft distribution supports."""

    q: Tensor  # [N, K] sums to one
    p: Tensor  # [N, K] the target's probability of the same tokens, after the text so far
    is_text: Tensor  # [N, K] bool, which of them the text has here: at most one


class Draws(NamedTuple):
    """The randomness of one slot: tests enumerate it, `of` draws it."""

    uniform: Tensor  # [N] is the draft accepted (rejection)?
    pick: Tensor  # [N] uniform, which token a draft that is not the text's is
    first: Tensor  # [N] exponential E_0
    others: Tensor  # [N, K] exponentials E_j

    @classmethod
    def of(cls, slot: Slot, rng: torch.Generator) -> Draws:
        """Draw for one slot."""
        num = len(slot.q)
        uniform, pick = torch.rand((2, num), generator=rng, dtype=torch.float64)
        first = torch.empty(num, dtype=torch.float64).exponential_(generator=rng)
        others = torch.empty(slot.q.shape, dtype=torch.float64).exponential_(generator=rng)
        return cls(uniform, pick, first, others)


def accept_probability(slot: Slot, rule: Rule) -> Tensor:
    """P(the draft token is accepted | the slot is reached, the text), [N] float64."""
    q, p = slot.q.double(), slot.p.double()
    q_text, p_text = (torch.where(slot.is_text, x, 0.0).sum(-1) for x in (q, p))
    if rule == "greedy":
        best = q.argmax(-1, keepdim=True)
        return slot.is_text.gather(1, best)[:, 0].double()
    if rule == "rejection":
        return torch.where(q_text >= p_text, 1.0, q_text / p_text).where(q_text > 0, 0.0)
    ratio = (p_text / q_text)[:, None]
    beyond = (q * ratio - p).clamp_min(0.0).sum(-1)
    return torch.where(q_text > 0, 1.0 / (1.0 + beyond), 0.0)


def draw(slot: Slot, rule: Rule, reached: Tensor, draws: Draws) -> Tensor:
    """Return which token of the support each block drafts, [N], given the text.

    `reached` [N]: all draft tokens before it were accepted. Where one was refused, decoding never compares this
    draft with the text, but confidences depend on it.
    """
    q, p = slot.q.double(), slot.p.double()
    text = slot.is_text.long().argmax(-1)
    if rule == "greedy":
        return q.argmax(-1)
    if rule == "coupled":
        slack = torch.where(slot.is_text, 0.0, draws.others)
        return ((p * draws.first[:, None] + slack) / q).argmin(-1)
    refused = _pick((q - p).clamp_min(0.0), draws.pick)
    free = _pick(q, draws.pick)
    accepted = draws.uniform < accept_probability(slot, rule)
    return torch.where(reached, torch.where(accepted, text, refused), free)


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulated weights [N, K] at uniform [N] in [0, 1)."""
    total = weights.cumsum(-1)
    at = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0]
    return at.clamp_max(weights.shape[1] - 1)
