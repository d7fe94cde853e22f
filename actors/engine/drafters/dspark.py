"""The DSpark drafter as a module: parallel backbone, Markov head, confidence head (spec 1.2 to 1.9).

This form computes many blocks of a sequence at once, teacher forced; training and held-out
measurement use it, and it is the reference for the serving engine beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.config import DSparkConfig
from actors.engine.rotary import rotary_tables, rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Block queries over strict-prefix context keys and their own block, both directions."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.kv_heads, self.head_dim = config.num_key_value_heads, hd
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(d, config.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, d, bias=False)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values, [..., kv_heads, head_dim], of x [..., d]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, context: Tensor, tables: BlockTables, context_mask: Tensor
    ) -> Tensor:
        """x [B, N, g, d], already normalised; context [B, S, d]; mask [B, N, S], additive."""
        b, n, g, _ = x.shape
        kv, group, hd = self.kv_heads, self.group, self.head_dim
        q = rotate(self.q_norm(self.q_proj(x).view(b, n, g, -1, hd)), tables.cos, tables.sin)
        q = q.view(b, n, g, kv, group, hd).permute(0, 3, 1, 4, 2, 5)  # [B, kv, N, group, g, hd]
        own_k, own_v = self.keys_values(x, tables.cos, tables.sin)
        ctx_k, ctx_v = self.keys_values(context, tables.context_cos, tables.context_sin)
        ctx_k, ctx_v = ctx_k.transpose(1, 2), ctx_v.transpose(1, 2)  # [B, kv, S, hd]
        own_k, own_v = (t.permute(0, 3, 1, 2, 4) for t in (own_k, own_v))  # [B, kv, N, g, hd]
        span = ctx_k.shape[2]
        to_context = q.reshape(b, kv, n * group * g, hd) @ ctx_k.transpose(2, 3)
        to_context = to_context.view(b, kv, n, group * g, span) + context_mask[:, None, :, None]
        to_own = q.reshape(b, kv, n, group * g, hd) @ own_k.transpose(3, 4)
        scores = torch.cat((to_context, to_own), dim=-1).float() * hd**-0.5
        weights = scores.softmax(-1).to(own_v.dtype)
        mixed = weights[..., :span].reshape(b, kv, n * group * g, span) @ ctx_v
        mixed = mixed.view(b, kv, n, group * g, hd) + weights[..., span:] @ own_v
        mixed = mixed.view(b, kv, n, group, g, hd).permute(0, 2, 4, 1, 3, 5)
        out: Tensor = self.o_proj(mixed.reshape(b, n, g, -1))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm decoder layer; the context enters its attention as it is, without this norm."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, context: Tensor, tables: BlockTables, context_mask: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, tables, context_mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BlockTables:
    """Rotary tables of the slots of each block and of the context positions."""

    def __init__(self, cos: Tensor, sin: Tensor, anchors: Tensor, gamma: int, span: int) -> None:
        """Gather from cos, sin [positions, hd] for anchors [B, N] and context 0..span-1."""
        slots = anchors[..., None] + torch.arange(gamma, device=anchors.device)
        self.cos, self.sin = cos[slots][..., None, :], sin[slots][..., None, :]
        self.context_cos, self.context_sin = cos[:span, None], sin[:span, None]


class MarkovHead(nn.Module):
    """Low-rank bigram bias W2 . W1[previous token]; W1 over target ids, W2 over draft ids."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """One logit a slot from [hidden; W1[previous token]]: will the target accept this draft?"""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.confidence_dim, 1)


class DSparkModel(nn.Module):
    """Parameters carry DeepSpec's names (spec 1.12); embed and head are frozen buffers."""

    embed: Tensor
    head: Tensor
    draft_ids: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(
        self, config: DSparkConfig, embed: Tensor, head: Tensor, draft_ids: Tensor
    ) -> None:
        """Take the target's embed [V, d] and output head [V, d]; `draft_ids` [Vd] are target ids."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_dim, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("head", head[draft_ids].contiguous(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        cos, sin = rotary_tables(config.head_dim, config.rope_theta, config.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def block_ids(self, anchor_ids: Tensor) -> Tensor:
        """Return [..., gamma]: the anchor in slot 0, the mask token elsewhere."""
        ids = torch.full(
            (*anchor_ids.shape, self.config.block_size),
            self.config.mask_token_id,
            device=anchor_ids.device,
        )
        ids[..., 0] = anchor_ids
        return ids

    def backbone(self, features: Tensor, anchors: Tensor, anchor_ids: Tensor) -> Tensor:
        """Return slot hiddens [B, N, gamma, d] after the final norm.

        `features` [B, S, taps * d] of positions 0..S-1; `anchors` [B, N] positions. A block sees
        features strictly before its anchor: the target has not processed the anchor yet.
        """
        span = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        gamma = self.config.block_size
        dtype = context.dtype
        tables = BlockTables(self.cos.to(dtype), self.sin.to(dtype), anchors, gamma, span)
        mask = strict_context_mask(anchors, span).to(dtype)
        x = self.embed[self.block_ids(anchor_ids)].to(dtype)
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        out: Tensor = self.norm(x)
        return out

    def markov_embedding(self, previous_ids: Tensor) -> Tensor | None:
        """Return W1 rows [..., r] of the tokens before each slot's prediction; None without the head."""
        if self.markov_head is None:
            return None
        rows: Tensor = self.markov_head.markov_w1(previous_ids)
        return rows

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Return corrected fp32 logits [..., Vd] of hidden [..., d] given the previous tokens."""
        base = F.linear(hidden, self.head.to(hidden.dtype)).float()
        rows = self.markov_embedding(previous_ids)
        if rows is None or self.markov_head is None:
            return base
        bias: Tensor = self.markov_head.markov_w2(rows.to(hidden.dtype))
        return base + bias.float()

    def confidence_logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return fp32 logits [...] of conditional acceptance; `rows` are W1 rows [..., r]."""
        assert self.confidence_head is not None
        if self.config.confidence_head_with_markov:
            assert rows is not None
            hidden = torch.cat((hidden.float(), rows.float()), dim=-1)
        proj = self.confidence_head.proj
        with torch.autocast(hidden.device.type, enabled=False):
            out = F.linear(hidden.float(), proj.weight.float(), proj.bias.float())
        return out.squeeze(-1)


def strict_context_mask(anchors: Tensor, span: int) -> Tensor:
    """Return additive fp32 [B, N, span]: 0 where position < anchor, -inf elsewhere (spec 1.5)."""
    visible = torch.arange(span, device=anchors.device) < anchors[..., None]
    return torch.zeros(visible.shape, device=anchors.device).masked_fill(~visible, float("-inf"))
