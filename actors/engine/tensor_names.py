"""Which tensors a checkpoint of the decoder family has, by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from actors.engine.checkpoint import ModelConfig
from actors.engine.weights import check_names


def check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Refuse a checkpoint with a missing or unexpected tensor; raises CheckpointError naming it."""
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.tied_embeddings:
        wanted.add("lm_head.weight")
    for layer in range(config.num_layers):
        wanted |= {f"model.layers.{layer}.{name}" for name in _layer_names(config, layer)}
    # Written by old versions of transformers, never needed: tied heads, frequencies.
    optional = {n for n in tensors if n == "lm_head.weight" or n.endswith("rotary_emb.inv_freq")}
    check_names(tensors, wanted, optional)


def _layer_names(config: ModelConfig, layer: int) -> list[str]:
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    names += [f"self_attn.{p}_proj.bias" for p in "qkv"] if config.qkv_bias else []
    names += ["self_attn.o_proj.bias"] if config.output_bias else []
    names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if config.qk_norm else []
    if not config.is_sparse(layer):
        kinds = ("weight", "bias") if config.mlp_bias else ("weight",)
        return names + [f"mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in kinds]
    assert config.moe is not None
    router, experts, parts = expert_names(config)
    names.append(router)
    return names + [f"{experts}.{e}.{p}" for e in range(config.moe.num_experts) for p in parts]


def expert_names(config: ModelConfig) -> tuple[str, str, tuple[str, str, str]]:
    """Names inside a sparse layer: the router, the experts' prefix, and (gate, up, down) of one expert."""
    if config.architecture == "MixtralForCausalLM":
        block = "block_sparse_moe"
        return f"{block}.gate.weight", f"{block}.experts", ("w1.weight", "w3.weight", "w2.weight")
    parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    return "mlp.gate.weight", "mlp.experts", parts
