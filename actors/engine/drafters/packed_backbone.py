"""The DSpark drafter's weights laid out for serving, and its forward, wherever the context lies."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from actors.engine.drafters.dspark import DSparkModel, Layer
from actors.engine.drafters.heads import MarkovHead as SequentialHead
from actors.engine.packed_linear import GatedMlp, Linear, packs
from actors.engine.rotary import rotary_tables, rotate
from kernels.markov_sample import MarkovHead

# (layer, q [N, g, heads, hd], k, v [N, g, kv_heads, hd]) -> [N, g, heads * hd]: q attends, unscaled, to the context of
# its request and to all of its own block's k and v.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class BegunBlock(NamedTuple):
    """Blocks as far as their slots need each other: up to and with the attention of the last layer."""

    x: Tensor  # [N, block_size, d] before that layer
    mixed: Tensor  # [N, block_size, heads * hd] what it attended to


@dataclass
class _PackedLayer:
    qkv: Linear
    out: Linear
    mlp: GatedMlp
    norm_in: Tensor
    norm_post: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class PackedBackbone:
    """Same mathematics as `DSparkModel`, one block a request, context K/V given instead of features."""

    def __init__(self, model: DSparkModel, dtype: torch.dtype, device: torch.device) -> None:
        """Fuse and lay out every weight of `model` once."""
        self.config, self.dtype, self.device = model.config, dtype, device
        weight = self._weight
        self.embed = weight(model.embed)
        self.head = Linear(weight(model.head))
        self.draft_ids = model.draft_ids.to(device) if model.config.reduced else None
        self.fc = Linear(weight(model.fc.weight))
        self.hidden_norm, self.norm = weight(model.hidden_norm.weight), weight(model.norm.weight)
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        self.layers = [self._pack_layer(layer) for layer in layers]
        # K and V of a context token in every layer come from the same input: one matmul for all.
        context_kv = [p.weight for a in layers for p in (a.self_attn.k_proj, a.self_attn.v_proj)]
        self._context_kv = Linear(weight(torch.cat(context_kv)))
        self._cos, self._sin = weight(model.cos), weight(model.sin)
        self.num_moves = 0  # of the rotary tables: what was captured with the old ones is void
        self.markov: MarkovHead | None = None
        self.sequential: SequentialHead | None = None  # a head whose code needs the slot's hidden
        if type(model.markov_head) is SequentialHead:
            head = model.markov_head
            w2 = weight(head.markov_w2.weight)
            bias = Linear(w2) if packs(w2) else None
            self.markov = MarkovHead(weight(head.markov_w1.weight), w2, bias)
        elif model.markov_head is not None:
            self.sequential = deepcopy(model.markov_head).to(device, dtype)
        self._confidence: tuple[Tensor, Tensor] | None = None
        if model.confidence_head is not None:
            proj = model.confidence_head.proj
            self._confidence = (
                proj.weight.detach()[0].float().to(device),
                proj.bias.detach().float().to(device),
            )

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, each [layers, T, kv_heads, head_dim].

        features [T, taps * d] of context tokens at absolute positions [T], which `cover_positions` has seen.
        """
        config = self.config
        hidden = self.rms_norm(self.fc(features.to(self.device, self.dtype)), self.hidden_norm)
        shape = (len(features), len(self.layers), 2, config.num_key_value_heads, config.head_dim)
        keys, values = self._context_kv(hidden).view(shape).permute(2, 1, 0, 3, 4)
        if config.qk_norm:
            norms = [layer.k_norm for layer in self.layers if layer.k_norm is not None]
            keys = torch.stack(
                [self.rms_norm(k, norm) for k, norm in zip(keys, norms, strict=True)]
            )
        cos, sin = self._cos[positions], self._sin[positions]
        return rotate(keys, cos[:, None], sin[:, None]), values

    def block(
        self, anchor_ids: Tensor, anchors: Tensor, attend: Attend, num_slots: int | None = None
    ) -> Tensor:
        """Return hiddens [N, num_slots, d] of the first slots (None: all) after the final norm; see `begin`."""
        x, mixed = (part[:, :num_slots] for part in self.begin(anchor_ids, anchors, attend))
        return self.finish(x.flatten(0, 1), mixed.flatten(0, 1)).view(x.shape)

    def begin(self, anchor_ids: Tensor, anchors: Tensor, attend: Attend) -> BegunBlock:
        """Compute blocks as far as all of their slots are needed, whichever will be drafted.

        anchor_ids, anchors [N]: token and absolute position; `cover_positions` has seen the last slot's. The block is
        bidirectional, so a shorter one would change every slot: it is always computed whole. No size follows from a
        tensor's contents, so that the whole can be captured.
        """
        config = self.config
        size = config.block_size
        ids = torch.full((len(anchors), size), config.mask_token_id, device=self.device)
        ids[:, 0] = anchor_ids
        positions = anchors[:, None] + torch.arange(size, device=self.device)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        x = self.embed[ids].flatten(0, 1)
        mixed = x
        for index, layer in enumerate(self.layers):
            if index:
                x = self._rest(x, mixed, self.layers[index - 1])
                qkv = layer.qkv(self.rms_norm(x, layer.norm_in)).unflatten(0, (-1, size))
            else:
                qkv = self._first_qkv(anchor_ids, layer)
            mixed = attend(index, *self._heads(qkv, layer, cos, sin)).flatten(0, 1)
        return BegunBlock(x.unflatten(0, (-1, size)), mixed.unflatten(0, (-1, size)))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return hiddens [M, d] after the final norm, of any M slots of a `BegunBlock`."""
        return self.rms_norm(self._rest(x, mixed, self.layers[-1]), self.norm)

    def _rest(self, x: Tensor, mixed: Tensor, layer: _PackedLayer) -> Tensor:
        """What a layer makes of rows [M, ...] behind its attention: nothing there looks at another row."""
        x = layer.out.plus(mixed, x)
        return layer.mlp.plus(self.rms_norm(x, layer.norm_post), x)

    def _first_qkv(self, anchor_ids: Tensor, layer: _PackedLayer) -> Tensor:
        """Return [N, block_size, ...]: before rotation all slots but the first are one mask token, projected once."""
        size = self.config.block_size
        ids = F.pad(anchor_ids, (0, 1), value=self.config.mask_token_id)
        qkv = layer.qkv(self.rms_norm(self.embed[ids], layer.norm_in))
        masks = qkv[-1].expand(len(anchor_ids), size - 1, -1)
        return torch.cat((qkv[:-1, None], masks), 1)

    def confidence_logits(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor | None:
        """Return fp32 [...] for hidden [..., d] and W1 rows [..., r]; None without the head."""
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        inputs = hidden.float()
        if self.config.confidence_head_with_markov:
            assert embeddings is not None
            inputs = torch.cat((inputs, embeddings.float()), -1)
        return inputs @ weight + bias

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise the last dimension of x by its root mean square and scale it."""
        out: Tensor = F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)
        return out

    def cover_positions(self, last: int) -> None:
        """Grow the rotary tables to hold `last`: a block reaches beyond its anchor, a target's context beyond both."""
        if last < len(self._cos):
            return
        length = max(last + 1, 2 * len(self._cos))
        tables = rotary_tables(self.config.head_dim, self.config.rope_theta, length)
        self._cos, self._sin = (self._weight(table) for table in tables)
        self.num_moves += 1

    def _heads(
        self, qkv: Tensor, layer: _PackedLayer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [N, g, heads, head_dim] of their projections [N, g, ...], normed and rotated."""
        config = self.config
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split([heads, kv, kv], dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.rms_norm(q, layer.q_norm), self.rms_norm(k, layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _weight(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, self.dtype).contiguous()

    def _pack_layer(self, layer: Layer) -> _PackedLayer:
        attention, mlp, weight = layer.self_attn, layer.mlp, self._weight
        normed = self.config.qk_norm
        qkv = torch.cat([getattr(attention, f"{n}_proj").weight for n in "qkv"])
        return _PackedLayer(
            qkv=Linear(weight(qkv)),
            out=Linear(weight(attention.o_proj.weight)),
            mlp=GatedMlp(
                weight(mlp.gate_proj.weight),
                weight(mlp.up_proj.weight),
                weight(mlp.down_proj.weight),
            ),
            norm_in=weight(layer.input_layernorm.weight),
            norm_post=weight(layer.post_attention_layernorm.weight),
            q_norm=weight(attention.q_norm.get_parameter("weight")) if normed else None,
            k_norm=weight(attention.k_norm.get_parameter("weight")) if normed else None,
        )


class PaddedContext:
    """Attention over context rows padded to the longest, one fused call a layer, which is what a CPU wants.

    Args:
        keys, values: [layers, N, kv_heads, S + g, head_dim]; the last g columns are the block's, written here.
        beyond: [N, S + g], true where a row holds nothing.
    """

    def __init__(self, keys: Tensor, values: Tensor, beyond: Tensor) -> None:
        self._keys, self._values = keys, values
        mask = torch.zeros(beyond.shape, dtype=keys.dtype, device=keys.device)
        self._mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attend`."""
        keys, values = self._keys[layer], self._values[layer]
        count, size, heads, dim = q.shape
        kv = k.shape[2]
        keys[:, :, -size:], values[:, :, -size:] = k.transpose(1, 2), v.transpose(1, 2)
        # The query heads of a K/V head, and the slots, are rows of one product: all see the same keys.
        q = q.view(count, size, kv, heads // kv, dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(count, kv, -1, dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask)
        mixed = mixed.view(count, kv, -1, size, dim).permute(0, 3, 1, 2, 4)
        return mixed.reshape(count, size, -1)
