"""Drafters of one layer over pairs (target feature of position i, token of position i + 1): EAGLE-3 and MTP.

A pair enters the layer without looking at other pairs, so the keys and values of committed pairs follow from features
and tokens alone: after each round those of the round's own guesses are dropped and verified ones appended, which is
what DeepSpec's crop and extend come to with one layer. Drafting is a chain: the query of the last pair, at position
anchor - 1, predicts the token after the anchor; its output then stands in for the target's feature of the anchor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.config import PairConfig
from actors.engine.drafters.layers import MLP, Projections, RMSNorm, strict_context_mask
from actors.engine.drafters.model import BlockInputs, DraftModel


class PairContext:
    """What the chain of each block attends to: committed pairs, then the block's own guesses.

    Args:
        keys, values: [B, kv_heads, S, head_dim] of pairs 0 .. S - 1, the last committed one included.
        mask: [B, N, S] additive.
    """

    def __init__(self, keys: Tensor, values: Tensor, mask: Tensor) -> None:
        self._keys, self._values, self._mask = keys, values, mask
        self._own: list[tuple[Tensor, Tensor]] = []

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Let each block see one guess of its own more; keys, values [B, N, kv_heads, head_dim]."""
        self._own.append((keys, values))

    def mix(self, queries: Tensor) -> Tensor:
        """Return [B, N, heads * head_dim] for queries [B, N, heads, head_dim], one a block."""
        b, n, heads, hd = queries.shape
        kv, span = self._keys.shape[1], self._keys.shape[2]
        group = heads // kv
        q = queries.view(b, n, kv, group, hd)
        flat = q.transpose(1, 2).reshape(b, kv, n * group, hd)
        scores = (flat @ self._keys.transpose(2, 3)).view(b, kv, n, group, span).float()
        scores = scores + self._mask[:, None, :, None]
        own_v = None
        if self._own:
            own_k, own_v = (torch.stack(parts, 3) for parts in zip(*self._own, strict=True))
            own = (q @ own_k.transpose(3, 4)).transpose(1, 2).float()  # [B, kv, N, group, s]
            scores = torch.cat((scores, own), -1)
        weights = (scores * hd**-0.5).softmax(-1).to(queries.dtype)
        mixed = weights[..., :span].reshape(b, kv, n * group, span) @ self._values
        mixed = mixed.view(b, kv, n, group, hd).transpose(1, 2)
        if own_v is not None:
            mixed = mixed + weights[..., span:].transpose(1, 2) @ own_v
        flattened: Tensor = mixed.reshape(b, n, -1)
        return flattened


class PairLayer(nn.Module):
    """The one decoder layer; its attention reads inputs of `width`, its residual is hidden_size wide."""

    def __init__(self, config: PairConfig, width: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config, width)
        self.mlp = MLP(config)


class PairModel(DraftModel):
    """Subclasses say how a feature becomes the first hidden state and how a pair enters the layer."""

    config: PairConfig

    def __init__(
        self, config: PairConfig, embed: Tensor, head: Tensor, draft_ids: Tensor, layer: PairLayer
    ) -> None:
        """See `DraftModel`."""
        super().__init__(config, embed, head, draft_ids)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([layer])
        self.project_head: Callable[[Tensor], Tensor] | None = None  # set where it is packed

    def first_hidden(self, features: Tensor) -> Tensor:
        """Return [..., d] for features [..., feature_dim]."""
        raise NotImplementedError

    def enter(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (residual [..., d], attention input [..., width]) of pairs (hidden, next token)."""
        raise NotImplementedError

    @property
    def layer(self) -> PairLayer:
        """The layer."""
        layer = self.layers[0]
        assert isinstance(layer, PairLayer)
        return layer

    def base_logits(self, hidden: Tensor) -> Tensor:
        """See `DraftModel`."""
        if self.project_head is not None:
            return self.project_head(hidden).float()
        return super().base_logits(hidden)

    def pair_keys_values(
        self, features: Tensor, next_ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [..., T, kv_heads, head_dim] of pairs at positions [T]."""
        _residual, x = self.enter(self.first_hidden(features), next_ids)
        cos, sin = self.rotary_rows(positions)
        return self.layer.self_attn.keys_values(x, cos.to(x.dtype), sin.to(x.dtype))

    def chain(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        anchors: Tensor,
        context: PairContext,
        num_slots: int,
        choose: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """Return slot hiddens [B, N, num_slots, d] after the final norm.

        hidden [B, N, d] belongs to position anchor - 1; `choose` gives the token ids [B, N] of slot k from its
        hidden, for the last slot too.
        """
        attention, layer, made = self.layer.self_attn, self.layer, []
        token_ids = anchor_ids
        for slot in range(num_slots):
            residual, x = self.enter(hidden, token_ids)
            cos, sin = (t.to(x.dtype) for t in self.rotary_rows(anchors - 1 + slot))
            if slot:  # the pair of slot 0 lies in the context already
                context.add(*attention.keys_values(x, cos, sin))
            hidden = residual + attention.o_proj(context.mix(attention.queries(x, cos, sin)))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            made.append(self.norm(hidden))
            token_ids = choose(slot, made[-1])
        return torch.stack(made, 2)

    def slots(self, inputs: BlockInputs, previous: Tensor) -> Tensor:
        """See `DraftModel`: training-time test with the text's own tokens (spec 9.1)."""
        gamma = self.config.block_size
        return self._unroll(inputs, lambda k, _hidden: previous[..., min(k + 1, gamma - 1)])

    def draft(self, inputs: BlockInputs, choose: Callable[[Tensor], Tensor]) -> None:
        """See `DraftModel`."""
        self._unroll(inputs, lambda _slot, hidden: choose(self.base_logits(hidden)))

    def _unroll(self, inputs: BlockInputs, choose: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Chain every block over the pairs before its anchor. Padded anchors are 0 and count as 1."""
        span = inputs.features.shape[1]
        anchors = inputs.anchors.clamp_min(1)
        first = self.first_hidden(inputs.features)
        _residual, x = self.enter(first, inputs.next_ids)
        cos, sin = self.rotary_rows(torch.arange(span, device=x.device))
        keys, values = self.layer.self_attn.keys_values(x, cos.to(x.dtype), sin.to(x.dtype))
        mask = strict_context_mask(anchors, span)
        context = PairContext(keys.transpose(1, 2), values.transpose(1, 2), mask)
        at = (anchors - 1)[..., None].expand(-1, -1, first.shape[-1])
        gamma = self.config.block_size
        return self.chain(first.gather(1, at), inputs.anchor_ids, anchors, context, gamma, choose)

    def embed_tokens(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the target's embedding rows [..., d]."""
        return F.embedding(token_ids, self.embed).to(dtype)
