"""What every trained drafter is as a module, so that training and held-out measurement know one kind of thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.config import DrafterConfig
from actors.engine.rotary import rotary_tables


@dataclass(frozen=True)
class BlockInputs:
    """B sequences with N anchors each. The token at a position is what its anchor or `next_ids` says."""

    features: Tensor  # [B, S, feature_dim] of positions 0 .. S - 1
    next_ids: Tensor  # [B, S] the token after each of these positions
    anchors: Tensor  # [B, N] positions, at most S
    anchor_ids: Tensor  # [B, N]


class DraftModel(nn.Module):
    """Parameters carry the checkpoint's names; the target's tables are frozen buffers.

    Subclasses give the two methods that raise below. The logits of a slot are always
    head · hidden + W2 · code, with codes of width 0 where there is no sequential head.
    """

    config: DrafterConfig
    embed: Tensor
    head: Tensor
    draft_ids: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: DrafterConfig, embed: Tensor, head: Tensor, draft_ids: Tensor
    ) -> None:
        """Take the target's embed [V, d] and output head [V, d]; `draft_ids` [Vd] are target ids."""
        super().__init__()
        self.config = config
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head[draft_ids].contiguous(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        cos, sin = rotary_tables(config.head_dim, config.rope_theta, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def slots(self, inputs: BlockInputs, previous: Tensor) -> Tensor:
        """Return slot hiddens [B, N, gamma, d] after the final norm, teacher forced.

        `previous` [B, N, gamma] is the token before each slot's prediction; slot 1 has the anchor.
        """
        raise NotImplementedError

    def kept_slots(
        self, inputs: BlockInputs, previous: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the loss reads of the slots with flat indices `kept` [M]: (hiddens [M, d], codes [M, r], W2).

        The same numbers as `slots` and `codes` give; a drafter may leave out work that only other slots need.
        """
        hidden = self.slots(inputs, previous)
        codes, w2 = self.codes(hidden, previous)
        return hidden.flatten(0, 2)[kept], codes.flatten(0, 2)[kept], w2

    def draft(self, inputs: BlockInputs, choose: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Draft every block slot by slot, each token conditioned on those before it.

        `choose` turns a slot's corrected fp32 logits [B, N, Vd] into its target ids [B, N]. Returns fp32 confidence
        logits [B, N, gamma]; None without a confidence head.
        """
        raise NotImplementedError

    def codes(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequential head's codes [..., gamma, r] and its W2 [Vd, r]; r = 0 without one."""
        del previous
        return hidden.new_zeros((*hidden.shape[:-1], 0)), self.head.new_zeros(len(self.head), 0)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 [..., Vd] without the sequential head's bias."""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()

    def slot_confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Return fp32 confidence logits [..., gamma]; None without a confidence head."""
        del hidden, previous
        return None

    def rotary_rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) rows [..., 1, head_dim]; the tables grow when a position lies beyond them."""
        last = int(positions.max()) if positions.numel() else 0
        if last >= len(self.cos):
            length = max(last + 1, 2 * len(self.cos))
            cos, sin = rotary_tables(self.config.head_dim, self.config.rope_theta, length)
            self.cos, self.sin = cos.to(self.cos), sin.to(self.sin)
        return self.cos[positions][..., None, :], self.sin[positions][..., None, :]


def peak(logits: Tensor) -> Tensor:
    """Return the largest probability of softmax(logits), [...] fp32."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()
