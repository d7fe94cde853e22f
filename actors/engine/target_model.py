"""The decoder family as one flattened forward: every op sees all B tokens of a step, whichever request they are of.

Rows of q and k are stored so that the two halves a rotary embedding turns against each other lie side by side; a
rotation is then one complex product. Nothing outside sees that order, because q and k only meet each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.checkpoint import ModelConfig
from actors.engine.experts import ExpertBank, MoeLayer
from actors.engine.feed_forward import FeedForwards, Ids
from actors.engine.packed_linear import GatedMlp, Linear, Numerics, linear_for, min_rows
from actors.engine.rotary import pair_halves, rotation_table
from actors.engine.sharded_experts import ExpertSharding, ShardedMoeLayer
from actors.engine.tensor_names import check_tensors
from actors.engine.weights import ModelTensors
from kernels import dispatch
from kernels.kv_store import KvStore
from kernels.paged_attention import PagedLayout
from kernels.ragged_attention import AttentionLayout, attend
from kernels.rms_norm import RmsNorm


@dataclass
class DecoderLayer:
    input_norm: RmsNorm
    qkv: Linear  # rows: q heads, k heads, v heads
    qk_norm: RmsNorm | None  # of each head of q and k, Qwen3
    output: Linear
    mlp_norm: RmsNorm
    mlp: GatedMlp | MoeLayer


@dataclass(frozen=True)
class StepInputs:
    """One step on the device."""

    token_ids: Tensor  # [B]
    positions: Tensor  # [B]
    slots: Tensor  # [B]; -1: a token that only pads the step (paged layout alone)
    # by window, see `ModelConfig.windows`
    attention: Mapping[int, AttentionLayout] | Mapping[int, PagedLayout]

    def done(self) -> None:
        """The forward has reached its end: what attention keeps from step to step is right."""
        for layout in self.attention.values():
            if isinstance(layout, AttentionLayout):
                layout.done()


class TargetModel:
    """Weights and forward of one model.

    Args:
        config: what `config.json` says.
        tensors: the checkpoint by name; read once, tensor by tensor.
        max_len: positions the rotary table covers.
        sharding: this rank's place in its group: it loads its own experts or slices only; None: all of them.

    Raises CheckpointError naming a missing, unexpected or misshapen tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        numerics: Numerics,
        max_len: int,
        sharding: ExpertSharding | None = None,
    ) -> None:
        check_tensors(tensors, config)
        self.config, self.dtype, self.device, self.numerics = config, dtype, device, numerics
        self.sharding = sharding
        self._linear = linear_for(device, dtype, numerics)
        self._feed_forwards = FeedForwards(config, device, numerics, self._linear, sharding)
        source = ModelTensors(tensors, dtype, device)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = source.take("model.embed_tokens.weight", *table)
        head = self.embedding if config.tied_embeddings else source.take("lm_head.weight", *table)
        self.head = self._linear(head)
        self.final_norm = self._norm(source, "model.norm")
        self.layers = [self._layer(source, i) for i in range(config.num_layers)]
        self._rotation = rotation_table(config.rope, config.head_dim, max_len).to(device)
        self.min_rows = min_rows(numerics)

    # --- loading ----------------------------------------------------------------------------------------------------

    def _layer(self, source: ModelTensors, index: int) -> DecoderLayer:
        config, hidden = self.config, self.config.hidden_size
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        weights, biases = [], []
        for part, count in heads.items():
            turned = part != "v"
            name, width = f"{attention}.{part}_proj", count * config.head_dim
            weight = source.take(f"{name}.weight", width, hidden)
            weights.append(pair_halves(weight, config.head_dim) if turned else weight)
            if config.qkv_bias:
                bias = source.take(f"{name}.bias", width)
                biases.append(pair_halves(bias, config.head_dim) if turned else bias)
        qkv = self._linear(torch.cat(weights), torch.cat(biases) if biases else None)
        out_name = f"{attention}.o_proj"
        output = self._linear(
            source.take(f"{out_name}.weight", hidden, config.num_heads * config.head_dim),
            source.take(f"{out_name}.bias", hidden) if config.output_bias else None,
        )
        return DecoderLayer(
            input_norm=self._norm(source, f"{prefix}.input_layernorm"),
            qkv=qkv,
            qk_norm=self._qk_norm(source, attention) if config.qk_norm else None,
            output=output,
            mlp_norm=self._norm(source, f"{prefix}.post_attention_layernorm"),
            mlp=self._feed_forwards.layer(source, index),
        )

    def _norm(self, source: ModelTensors, name: str) -> RmsNorm:
        weight = source.take(f"{name}.weight", self.config.hidden_size)
        return RmsNorm(weight, self.config.norm_eps)

    def _qk_norm(self, source: ModelTensors, attention: str) -> RmsNorm:
        dim = self.config.head_dim
        q, k = (source.take(f"{attention}.{p}_norm.weight", dim).float() for p in "qk")
        both = [(q, self.config.num_heads), (k, self.config.num_kv_heads)]
        weights = [pair_halves(w, dim).expand(count, dim) for w, count in both]
        return RmsNorm(torch.cat(weights), self.config.norm_eps)

    def expert_bank(
        self, tensors: Mapping[str, Tensor], layer: int, held: Ids, before: Ids
    ) -> ExpertBank:
        """Another choice of experts for a layer; those it already holds (`before`, in order) are not read again."""
        source = ModelTensors(tensors, self.dtype, self.device)
        present = self.layers[layer].mlp
        assert isinstance(present, MoeLayer)
        return self._feed_forwards.bank(source, layer, held, present, before)

    def new_store(self, num_blocks: int, block_size: int) -> KvStore:
        """Empty K/V for this model."""
        config = self.config
        sizes = config.num_layers, config.num_kv_heads, config.head_dim
        return KvStore(*sizes, num_blocks, block_size, self.dtype, self.device)

    # --- computing --------------------------------------------------------------------------------------------------

    def forward(
        self, inputs: StepInputs, store: KvStore, tap_layer_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers and write K/V.

        Returns the last layer's output [B, hidden], not yet normed, and the outputs of the tapped layers
        [B, num_taps * hidden], in the order of `tap_layer_ids`.
        """
        taps: dict[int, Tensor] = {}
        x = self.embedding.index_select(0, inputs.token_ids)
        factors = self.rotations(inputs)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x))
            x = layer.output.plus(self.mix(qkv, index, inputs, store, factors), x)
            x = layer.mlp.plus(layer.mlp_norm(x), x)
            if index in tap_layer_ids:
                taps[index] = x
        return x, torch.cat([taps[i] for i in tap_layer_ids], -1) if tap_layer_ids else None

    def mix(
        self, qkv: Tensor, index: int, inputs: StepInputs, store: KvStore, factors: Tensor | None
    ) -> Tensor:
        """Between the projections of layer `index`: norm and turn q and k, store k and v, attend.

        Args:
            qkv: [B, (heads + 2 * kv_heads) * head_dim]; may be overwritten.
            factors: `rotations` of the step.

        Returns [B, heads * head_dim].
        """
        layer, layout = self.layers[index], inputs.attention[self.config.windows[index]]
        if isinstance(layout, PagedLayout):
            return self._mix_paged(qkv, layer, index, inputs, layout, store)
        assert factors is not None
        return self._mix(qkv, layer, index, inputs, layout, store, factors)

    def join(self) -> None:
        """Take part in the collectives of a step in which this rank has no token and others have some."""
        for layer in self.layers:
            if isinstance(layer.mlp, ShardedMoeLayer):
                layer.mlp.join(self.embedding)

    def _mix(
        self,
        qkv: Tensor,
        layer: DecoderLayer,
        index: int,
        inputs: StepInputs,
        layout: AttentionLayout,
        store: KvStore,
        factors: Tensor,
    ) -> Tensor:
        """`mix` over padded rows, in place."""
        config, batch, dim = self.config, len(qkv), self.config.head_dim
        num_turned = config.num_heads + config.num_kv_heads
        q_width, turned_width = config.num_heads * dim, num_turned * dim
        # [B, heads + kv_heads, head_dim] in fp32: a view where the model is fp32, else a copy
        turned = qkv[:, :turned_width].float().view(batch, num_turned, dim)
        if layer.qk_norm is not None:
            turned.copy_(layer.qk_norm(turned))
        torch.view_as_complex(turned.view(batch, num_turned, -1, 2)).mul_(factors)
        if self.dtype != torch.float32:
            qkv[:, :turned_width].copy_(turned.view(batch, -1))
        store.write(index, inputs.slots, qkv[:, q_width:].view(batch, -1, dim))
        return attend(qkv[:, :q_width].view(batch, -1, dim), store, index, layout)

    def _mix_paged(
        self,
        qkv: Tensor,
        layer: DecoderLayer,
        index: int,
        inputs: StepInputs,
        layout: PagedLayout,
        store: KvStore,
    ) -> Tensor:
        """`mix` in two kernels, for a GPU."""
        config, pool, kind = self.config, store.pool(index), qkv.device.type
        queries = dispatch.chosen("rope_store", kind)(
            qkv,
            None if layer.qk_norm is None else layer.qk_norm.weight,
            config.norm_eps,
            self._rotation,
            inputs.positions,
            inputs.slots,
            pool,
            config.head_dim**-0.5,
        )
        keys, values = pool.chunk(2)
        mixed: Tensor = dispatch.chosen("attend_paged", kind)(queries, keys, values, layout)
        return mixed

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden [L, hidden]: [L, vocab_size]."""
        num_rows = len(hidden)
        if 0 < num_rows < self.min_rows:
            hidden = hidden.expand(self.min_rows, -1)
        return self.head(self.final_norm(hidden))[:num_rows]

    def rotations(self, inputs: StepInputs) -> Tensor | None:
        """Complex factors [B, heads + kv_heads, head_dim / 2], those of q also scale by head_dim ** -0.5.

        None where the layout is paged: its kernel looks them up itself.
        """
        if isinstance(next(iter(inputs.attention.values())), PagedLayout):
            return None
        factors = self._rotation.index_select(0, inputs.positions)[:, None]
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        scaled = factors * self.config.head_dim**-0.5
        return torch.cat([scaled.expand(-1, heads, -1), factors.expand(-1, kv_heads, -1)], 1)
