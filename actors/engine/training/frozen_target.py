"""The target as it is served, over dense rows and with feature taps: for making training text.

Weights, norms, rotations and experts are those of the serving model (`actors.engine.target_model`), so whatever can be
served can be trained for. Only attention is another one: dense K/V rows in one process, no paging, which favours
throughput over everything a server needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.engine.checkpoint import model_config
from actors.engine.rotary import rotation_table
from actors.engine.target_model import DecoderLayer, TargetModel
from actors.engine.weights import Checkpoint, CheckpointError


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


@dataclass
class _Step:
    """Where the new tokens of a forward are, and what their queries see."""

    where: tuple[Tensor, Tensor]  # row in the chosen ones [R, 1], position [R, T]
    factors: Tensor  # [R * T, heads + kv_heads, head_dim / 2] complex
    first_row: int
    span: int
    masks: dict[int, Tensor]  # by window: additive [R, 1, group * T, span]


class FrozenTarget:
    """A checkpoint of the decoder family, inference only."""

    def __init__(
        self, model_dir: Path, tap_layer_ids: tuple[int, ...], dtype: torch.dtype, max_len: int
    ) -> None:
        """Load `model_dir`; raises CheckpointError for another family, missing tensors or a layer it lacks."""
        self.config = config = model_config(model_dir)
        if not all(0 <= i < config.num_layers for i in tap_layer_ids):
            raise CheckpointError(
                f"taps {tap_layer_ids}: {model_dir} has layers 0 to {config.num_layers - 1}; give --taps of these"
            )
        device = torch.device("cpu")
        tensors = Checkpoint(model_dir)
        self.model = TargetModel(config, tensors, dtype, device, "fast", max_len)
        self.hidden_size, self.tap_layer_ids = config.hidden_size, tap_layer_ids
        self.dtype, self.max_len = dtype, max_len
        factors = rotation_table(config.rope, config.head_dim, max_len)[:, None]
        self._factors = torch.cat(
            [
                (factors * config.head_dim**-0.5).expand(-1, config.num_heads, -1),
                factors.expand(-1, config.num_kv_heads, -1),
            ],
            1,
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab_size] of hidden [..., hidden_size] that the final norm has seen."""
        logits: Tensor = self.model.head(hidden.reshape(-1, self.hidden_size))
        return logits.view(*hidden.shape[:-1], -1)

    def new_rows(self, num_rows: int) -> Rows:
        """Return zeroed K/V for `num_rows` sequences of `max_len`."""
        config = self.config
        shape = (config.num_layers, num_rows, config.num_kv_heads, self.max_len, config.head_dim)
        return Rows(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))

    @torch.inference_mode()
    def forward(self, ids: Tensor, start: Tensor, rows: Rows, first_row: int) -> Forward:
        """Run T new tokens in R consecutive rows and write their K/V.

        ids [R, T]; start [R] is the position of each row's first new token; `first_row` places the
        R rows inside `rows`.
        """
        count, length = ids.shape
        step = self._step(start, length, first_row)
        taps = torch.empty(
            (count, length, len(self.tap_layer_ids), self.hidden_size), dtype=self.dtype
        )
        x = self.model.embedding[ids.flatten()]
        for index, layer in enumerate(self.model.layers):
            qkv = layer.qkv(layer.input_norm(x))
            x = layer.output.plus(self._attend(qkv, layer, index, rows, step), x)
            x = layer.mlp.plus(layer.mlp_norm(x), x)
            if index in self.tap_layer_ids:
                taps[:, :, self.tap_layer_ids.index(index)] = x.view(count, length, -1)
        return Forward(taps, self.model.final_norm(x).view(count, length, -1))

    def _step(self, start: Tensor, length: int, first_row: int) -> _Step:
        config, count = self.config, len(start)
        positions = start[:, None] + torch.arange(length)
        span = int(positions.max()) + 1
        group = config.num_heads // config.num_kv_heads
        distance = positions[:, :, None] - torch.arange(span)  # [R, T, span]
        masks = {}
        for window in set(config.windows):
            hidden = (distance < 0) | (distance >= window if window else False)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            mask = mask[:, None, None].expand(-1, 1, group, -1, -1)
            masks[window] = mask.reshape(count, 1, -1, span)
        where = (torch.arange(count)[:, None], positions)
        return _Step(where, self._factors[positions.flatten()], first_row, span, masks)

    def _attend(
        self, qkv: Tensor, layer: DecoderLayer, index: int, rows: Rows, step: _Step
    ) -> Tensor:
        """Grouped-query attention as two batched matmuls; far faster here than SDPA at decode.

        qkv [R * T, ...] as `DecoderLayer.qkv` gives it; returns [R * T, heads * head_dim].
        """
        count, length = step.where[1].shape
        heads, kv, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        parts = qkv.view(count * length, -1, dim)
        turned = parts[:, : heads + kv].float()  # a view where the model is fp32, else a copy
        if layer.qk_norm is not None:
            turned.copy_(layer.qk_norm(turned))
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(step.factors)
        if self.dtype != torch.float32:
            parts[:, : heads + kv] = turned
        parts = parts.view(count, length, -1, dim)
        q, k, v = parts.split([heads, kv, kv], dim=2)
        own = slice(step.first_row, step.first_row + count)
        keys, values = rows.keys[index, own], rows.values[index, own]
        keys[step.where[0], :, step.where[1]] = k
        values[step.where[0], :, step.where[1]] = v
        grouped = (
            q.reshape(count, length, kv, -1, dim).permute(0, 2, 3, 1, 4).reshape(count, kv, -1, dim)
        )
        scores = (grouped @ keys[:, :, : step.span].transpose(2, 3)).float()
        scores += step.masks[self.config.windows[index]]
        mixed = scores.softmax(-1).to(self.dtype) @ values[:, :, : step.span]
        mixed = mixed.view(count, kv, -1, length, dim).permute(0, 3, 1, 2, 4)
        out: Tensor = mixed.reshape(count * length, -1)
        return out
