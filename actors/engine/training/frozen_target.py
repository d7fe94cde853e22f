"""A plain batched Llama forward with feature taps, for making training text.

It favours throughput over everything a server needs: dense K/V rows, one process, no paging. The
serving target engine is elsewhere; both read the same checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from actors.engine.packed_linear import Linear
from actors.engine.rotary import rotary_tables, rotate
from actors.engine.weights import Checkpoint, CheckpointError, read_config


@dataclass
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    norm_in: Tensor
    norm_post: Tensor


@dataclass
class Rows:
    """Dense K/V of `num_rows` sequences: each [layers, rows, kv_heads, max_len, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass
class Forward:
    """What one forward returns, for T new tokens in each of R rows."""

    taps: Tensor  # [R, T, taps, hidden], raw decoder outputs
    hidden: Tensor  # [R, T, hidden], after the final norm


class FrozenTarget:
    """A Llama-family checkpoint, inference only."""

    def __init__(
        self, model_dir: Path, tap_layer_ids: tuple[int, ...], dtype: torch.dtype, max_len: int
    ) -> None:
        """Load `model_dir`; raises CheckpointError for another architecture or missing tensors."""
        config = read_config(model_dir)
        if config.get("architectures") != ["LlamaForCausalLM"]:
            raise CheckpointError(f"architectures {config.get('architectures')} is not Llama")
        self.num_layers = int(config["num_hidden_layers"])
        self.num_heads = int(config["num_attention_heads"])
        self.num_kv_heads = int(config["num_key_value_heads"])
        self.hidden_size = int(config["hidden_size"])
        self.head_dim = int(config.get("head_dim") or self.hidden_size // self.num_heads)
        self.eps = float(config["rms_norm_eps"])
        self.tap_layer_ids = tap_layer_ids
        self.dtype = dtype
        self.max_len = max_len
        weights = Checkpoint(model_dir)
        self.embed = weights["model.embed_tokens.weight"].to(dtype)
        tied = "lm_head.weight" not in weights
        self.head_weight = self.embed if tied else weights["lm_head.weight"].to(dtype)
        self.head = Linear(self.head_weight)
        self.norm = weights["model.norm.weight"].to(dtype)
        self.layers = [self._layer(weights, i) for i in range(self.num_layers)]
        cos, sin = rotary_tables(self.head_dim, float(config["rope_theta"]), max_len)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)

    def _layer(self, weights: Checkpoint, index: int) -> _Layer:
        def get(name: str) -> Tensor:
            return weights[f"model.layers.{index}.{name}.weight"].to(self.dtype)

        qkv = torch.cat([get(f"self_attn.{n}_proj") for n in "qkv"])
        gate_up = torch.cat([get(f"mlp.{n}_proj") for n in ("gate", "up")])
        return _Layer(
            qkv=Linear(qkv),
            out=Linear(get("self_attn.o_proj")),
            gate_up=Linear(gate_up),
            down=Linear(get("mlp.down_proj")),
            norm_in=get("input_layernorm"),
            norm_post=get("post_attention_layernorm"),
        )

    def new_rows(self, num_rows: int) -> Rows:
        """Return zeroed K/V for `num_rows` sequences of `max_len`."""
        shape = (self.num_layers, num_rows, self.num_kv_heads, self.max_len, self.head_dim)
        return Rows(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))

    @torch.inference_mode()
    def forward(self, ids: Tensor, start: Tensor, rows: Rows, first_row: int) -> Forward:
        """Run T new tokens in R consecutive rows and write their K/V.

        ids [R, T]; start [R] is the position of each row's first new token; `first_row` places the
        R rows inside `rows`.
        """
        count, length = ids.shape
        positions = start[:, None] + torch.arange(length)
        span = int(positions.max()) + 1
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        hidden_mask = torch.arange(span)[None, None] > positions[:, :, None]  # [R, T, span]
        group = self.num_heads // self.num_kv_heads
        bias = torch.zeros(hidden_mask.shape).masked_fill(hidden_mask, float("-inf"))
        bias = bias[:, None, None].expand(-1, 1, group, -1, -1).reshape(count, 1, -1, span)
        taps = torch.empty(
            (count, length, len(self.tap_layer_ids), self.hidden_size), dtype=self.dtype
        )
        x = self.embed[ids]
        where = (torch.arange(count)[:, None], positions)
        for index, layer in enumerate(self.layers):
            keys = rows.keys[index, first_row : first_row + count]
            values = rows.values[index, first_row : first_row + count]
            x = x + self._attend(x, layer, keys, values, where, cos, sin, bias, span)
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.norm_post, self.eps)).chunk(
                2, -1
            )
            x = x + layer.down(F.silu(gate) * up)
            if index in self.tap_layer_ids:
                taps[:, :, self.tap_layer_ids.index(index)] = x
        return Forward(taps, F.rms_norm(x, x.shape[-1:], self.norm, self.eps))

    def _attend(
        self,
        x: Tensor,
        layer: _Layer,
        keys: Tensor,
        values: Tensor,
        where: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        bias: Tensor,
        span: int,
    ) -> Tensor:
        """Grouped-query attention as two batched matmuls; far faster here than SDPA at decode."""
        count, length, _ = x.shape
        kv, dim = self.num_kv_heads, self.head_dim
        normed = F.rms_norm(x, x.shape[-1:], layer.norm_in, self.eps)
        qkv = layer.qkv(normed).view(count, length, -1, dim)
        q, k, v = qkv.split([self.num_heads, kv, kv], dim=2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys[where[0], :, where[1]] = k
        values[where[0], :, where[1]] = v
        grouped = (
            q.view(count, length, kv, -1, dim).permute(0, 2, 3, 1, 4).reshape(count, kv, -1, dim)
        )
        scores = (grouped @ keys[:, :, :span].transpose(2, 3)).float() * dim**-0.5 + bias
        mixed = scores.softmax(-1).to(self.dtype) @ values[:, :, :span]
        mixed = mixed.view(count, kv, -1, length, dim).permute(0, 3, 1, 2, 4)
        return layer.out(mixed.reshape(count, length, -1))
