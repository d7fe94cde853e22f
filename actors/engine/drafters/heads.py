"""The sequential heads (spec 1.8) and the confidence head (spec 1.9).

A head turns W1[x_{k-1}] and, depending on its type, the slot's hidden state and what it remembers of earlier slots
into a code; the bias of the slot is W2 · code. Codes are what training and serving share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from actors.engine.drafters.config import DSparkConfig


class MarkovHead(nn.Module):
    """`vanilla`: the low-rank bigram bias W2 . W1[previous token]; W1 over target ids, W2 over draft ids."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def step(
        self, rows: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the code [..., r] of one slot and the state for the next one.

        rows [..., r] are W1[x_{k-1}], hidden [..., d] the slot's; `state` is None in slot 1.
        """
        del hidden, state
        return rows, None

    def codes(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """Return the codes [..., gamma, r] of whole blocks, teacher forced; rows, hidden [..., gamma, *]."""
        return self.step(rows, hidden, None)[0]


class GatedHead(MarkovHead):
    """`gated`: the slot's hidden state opens and closes each dimension of W1[x_{k-1}]."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, rows: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead`; g = sigmoid(gate_proj([h; e])), the code is g * e."""
        del state
        gate = self.gate_proj(torch.cat((hidden, rows.to(hidden.dtype)), -1)).sigmoid()
        return gate * rows, None


class RnnHead(MarkovHead):
    """`rnn`: a gated recurrence over the block. A fresh state acts from the next slot on."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(
        self, rows: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `MarkovHead`; z = joint_proj([s; e; h]) gives gate, candidate and, raw, the output."""
        rows = rows.to(hidden.dtype)
        state = torch.zeros_like(rows) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, rows, hidden), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def codes(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """See `MarkovHead`; slot by slot, since the state passes through them."""
        state, made = None, []
        for slot in range(hidden.shape[-2]):
            code, state = self.step(rows[..., slot, :], hidden[..., slot, :], state)
            made.append(code)
        return torch.stack(made, -2)


HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RnnHead}


def draft_left_to_right(
    head: MarkovHead,
    base_logits: Tensor,
    hidden: Tensor,
    anchor_ids: Tensor,
    choose: Callable[[Tensor], Tensor],
) -> Tensor:
    """Let `choose` decide the slots of blocks in order, carrying the head's state; returns W1 rows [..., gamma, r].

    `choose` turns a slot's corrected fp32 logits [..., V'] into its target ids [...].
    base_logits [..., gamma, V'], hidden [..., gamma, d], anchor_ids [...].
    """
    state, previous, seen = None, anchor_ids, []
    for slot in range(hidden.shape[-2]):
        rows = head.markov_w1(previous)
        code, state = head.step(rows, hidden[..., slot, :], state)
        bias = head.markov_w2(code.to(hidden.dtype))
        previous = choose(base_logits[..., slot, :].float() + bias.float())
        seen.append(rows)
    return torch.stack(seen, -2)


class ConfidenceHead(nn.Module):
    """One logit a slot from [hidden; W1[previous token]]: will the target accept this draft?"""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.confidence_dim, 1)
