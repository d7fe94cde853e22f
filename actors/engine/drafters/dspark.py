"""The DSpark drafter as a module: parallel backbone, sequential head, confidence head (spec 1.2 to 1.9).

This form computes many blocks of a sequence at once, teacher forced; training and held-out
measurement use it, and it is the reference for the serving engine beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.heads import (
    HEADS,
    ConfidenceHead,
    MarkovHead,
    RnnHead,
    draft_left_to_right,
)
from actors.engine.drafters.layers import MLP, Projections, RMSNorm, strict_context_mask
from actors.engine.drafters.model import BlockInputs, DraftModel


class Attention(Projections):
    """Block queries over strict-prefix context keys and their own block, both directions."""

    def forward(self, slots: Slots, context: Context, tables: SlotTables) -> Tensor:
        """Return [B, N, g, heads * hd], not yet projected; `slots` already normalised."""
        q, own_k, own_v = self._own(slots, tables)
        b, n, g = q.shape[:3]
        kv, group, hd = self.kv_heads, self.group, self.head_dim
        q = q.view(b, n, g, kv, group, hd).permute(0, 3, 1, 4, 2, 5)  # [B, kv, N, group, g, hd]
        ctx_k, ctx_v = (
            context.spread(t).transpose(1, 2)  # [B, kv, S, hd]
            for t in self.keys_values(context.rows, context.cos, context.sin)
        )
        own_k, own_v = (t.permute(0, 3, 1, 2, 4) for t in (own_k, own_v))  # [B, kv, N, g, hd]
        span = ctx_k.shape[2]
        to_context = q.reshape(b, kv, n * group * g, hd) @ ctx_k.transpose(2, 3)
        to_context = to_context.view(b, kv, n, group * g, span) + context.mask[:, None, :, None]
        to_own = q.reshape(b, kv, n, group * g, hd) @ own_k.transpose(3, 4)
        scores = torch.cat((to_context, to_own), dim=-1).float() * hd**-0.5
        weights = scores.softmax(-1).to(own_v.dtype)
        mixed = weights[..., :span].reshape(b, kv, n * group * g, span) @ ctx_v
        mixed = mixed.view(b, kv, n, group * g, hd) + weights[..., span:] @ own_v
        mixed = mixed.view(b, kv, n, group, g, hd).permute(0, 2, 4, 1, 3, 5)
        out: Tensor = mixed.reshape(b, n, g, -1)
        return out

    def _own(self, slots: Slots, tables: SlotTables) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [B, N, g, heads, hd]; what is the same in many slots is projected once."""
        made: list[tuple[Tensor, Tensor, Tensor]] = []
        at = 0
        for x, width in slots:
            cos, sin = (t[:, :, at : at + width] for t in (tables.cos, tables.sin))
            q, (k, v) = self.queries(x, cos, sin), self.keys_values(x, cos, sin)
            made.append((q, k, v.expand(k.shape)))
            at += width
        q, k, v = (torch.cat(parts, 2) for parts in zip(*made, strict=True))
        return q, k, v


class Layer(nn.Module):
    """Pre-norm decoder layer; the context enters its attention as it is, without this norm."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, slots: Slots, context: Context, tables: SlotTables, kept: Tensor | None = None
    ) -> Tensor:
        """Return [B, N, g, d], or [M, d] of the slots with flat indices `kept` [M]."""
        normed = [(self.input_layernorm(x), width) for x, width in slots]
        mixed = self.self_attn(normed, context, tables)
        b, n = mixed.shape[:2]
        x = torch.cat([x.expand(b, n, width, -1) for x, width in slots], 2)
        if kept is not None:
            x, mixed = x.flatten(0, 2)[kept], mixed.flatten(0, 2)[kept]
        x = x + self.self_attn.o_proj(mixed)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


# Inputs of a layer side by side: x, which broadcasts to [B, N, width, d], and the slots it fills.
Slots = list[tuple[Tensor, int]]


class SlotTables:
    """Rotary rows [B, N, g, 1, hd] of the slots of each block."""

    def __init__(self, cos: Tensor, sin: Tensor, anchors: Tensor, gamma: int) -> None:
        """Gather from cos, sin [positions, hd] for anchors [B, N]."""
        slots = anchors[..., None] + torch.arange(gamma, device=anchors.device)
        self.cos, self.sin = cos[slots][..., None, :], sin[slots][..., None, :]


class Context:
    """What blocks see of the text: one row a position that some anchor sees, of all sequences on end."""

    def __init__(self, rows: Tensor, anchors: Tensor, known: Tensor, cos: Tensor, sin: Tensor):
        """Take rows [R, d] of the positions `known` [B, S] bool, anchors [B, N], rotary tables [positions, hd]."""
        self.rows, self.known = rows, known
        positions = known.nonzero()[:, 1]
        self.cos, self.sin = cos[positions][:, None], sin[positions][:, None]
        self.mask = strict_context_mask(anchors, known.shape[1]).to(rows.dtype)

    def spread(self, rows: Tensor) -> Tensor:
        """Return [B, S, ...] of rows [R, ...], zero where nothing is known."""
        out = rows.new_zeros((*self.known.shape, *rows.shape[1:]))
        out[self.known] = rows
        return out


class DSparkModel(DraftModel):
    """Parameters carry DeepSpec's names (spec 1.12); without `markov_head` this is DFlash."""

    config: DSparkConfig

    def __init__(
        self, config: DSparkConfig, embed: Tensor, head: Tensor, draft_ids: Tensor
    ) -> None:
        """See `DraftModel`."""
        super().__init__(config, embed, head, draft_ids)
        self.fc = nn.Linear(config.feature_dim, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            self.markov_head = HEADS[config.markov_head_type](config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def slot_ids(self, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids of slot 1 [B, N, 1], the anchors, and of all later slots [1, 1, 1], the mask token."""
        mask = torch.tensor(self.config.mask_token_id, device=anchor_ids.device)
        return anchor_ids[..., None], mask.view(1, 1, 1)

    def backbone(
        self,
        features: Tensor,
        anchors: Tensor,
        anchor_ids: Tensor,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Return slot hiddens [B, N, gamma, d] after the final norm, or of the slots `kept` [M] alone [M, d].

        `features` [B, S, taps * d] of positions 0..S-1; `anchors` [B, N] positions. A block sees
        features strictly before its anchor: the target has not processed the anchor yet.
        """
        span = features.shape[1]
        known = torch.arange(span, device=anchors.device) < anchors.amax(1, keepdim=True)
        rows = self.hidden_norm(self.fc(features[known]))
        dtype, gamma = rows.dtype, self.config.block_size
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        context = Context(rows, anchors, known, cos, sin)
        tables = SlotTables(cos, sin, anchors, gamma)
        anchor, mask = (self.embed[ids].to(dtype) for ids in self.slot_ids(anchor_ids))
        slots = [(anchor, 1), (mask, gamma - 1)]
        for layer in self.layers[:-1]:
            slots = [(layer(slots, context, tables), gamma)]
        x = self.layers[-1](slots, context, tables, kept)  # nothing attends to what it makes
        out: Tensor = self.norm(x)
        return out

    def slots(self, inputs: BlockInputs, previous: Tensor) -> Tensor:
        """See `DraftModel`; the backbone is parallel, so nothing depends on `previous`."""
        del previous
        return self.backbone(inputs.features, inputs.anchors, inputs.anchor_ids)

    def kept_slots(
        self, inputs: BlockInputs, previous: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DraftModel`; the last layer then works on the kept slots only."""
        if isinstance(self.markov_head, RnnHead):  # its codes pass through the slots before
            return super().kept_slots(inputs, previous, kept)
        hidden = self.backbone(inputs.features, inputs.anchors, inputs.anchor_ids, kept)
        codes, w2 = self.codes(hidden, previous.flatten()[kept])
        return hidden, codes, w2

    def draft(self, inputs: BlockInputs, choose: Callable[[Tensor], Tensor]) -> Tensor | None:
        """See `DraftModel`."""
        hidden = self.backbone(inputs.features, inputs.anchors, inputs.anchor_ids)
        base = self.base_logits(hidden)
        if self.markov_head is None:
            for logits in base.unbind(-2):
                choose(logits)
            return self.confidence_logits(hidden, None)
        rows = draft_left_to_right(self.markov_head, base, hidden, inputs.anchor_ids, choose)
        return self.confidence_logits(hidden, rows)

    def markov_embedding(self, previous_ids: Tensor) -> Tensor | None:
        """Return W1 rows [..., r] of the tokens before each slot's prediction; None without the head."""
        if self.markov_head is None:
            return None
        rows: Tensor = self.markov_head.markov_w1(previous_ids)
        return rows

    def codes(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftModel`; hidden [..., gamma, d], previous [..., gamma]: whole blocks where the head is `rnn`."""
        rows = self.markov_embedding(previous)
        if self.markov_head is None or rows is None:
            return super().codes(hidden, previous)
        return self.markov_head.codes(rows, hidden), self.markov_head.markov_w2.weight

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Return corrected fp32 logits [..., gamma, Vd] of whole blocks, teacher forced."""
        codes, w2 = self.codes(hidden, previous_ids)
        base = self.base_logits(hidden)
        if not codes.shape[-1]:
            return base
        return base + F.linear(codes.to(hidden.dtype), w2.to(hidden.dtype)).float()

    def slot_confidences(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """See `DraftModel`."""
        return self.confidence_logits(hidden, self.markov_embedding(previous))

    def confidence_logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor | None:
        """Return fp32 logits [...] of conditional acceptance; `rows` are W1 rows [..., r]."""
        if self.confidence_head is None:
            return None
        hidden = hidden.float()
        if self.config.confidence_head_with_markov:
            assert rows is not None
            hidden = torch.cat((hidden, rows.float()), dim=-1)
        proj = self.confidence_head.proj
        with torch.autocast(hidden.device.type, enabled=False):
            out = F.linear(hidden, proj.weight.float(), proj.bias.float())
        return out.squeeze(-1)
