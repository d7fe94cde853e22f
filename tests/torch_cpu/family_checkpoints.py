"""Tiny checkpoints of random weights, one of every architecture that is served, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from actors.engine.checkpoint import ModelConfig, model_config
from actors.engine.tensor_names import check_tensors, expert_names

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, INNER, EXPERTS = 30, 16, 3, 4, 2, 8, 24, 4
EOS = 2

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": EOS,
}
FAMILY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
        "use_sliding_window": True,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
    },
    "MixtralForCausalLM": {
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}


def write_checkpoint(path: Path, architecture: str) -> Path:
    """The directory of a random model; its tokens are letters."""
    path.mkdir(parents=True)
    raw = {**COMMON, **FAMILY[architecture], "architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(len(architecture))
    config = model_config(path)
    tensors = {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if "norm" in name
        else 0.4 * torch.randn(shape, generator=generator)
        for name, shape in _shapes(config).items()
    }
    check_tensors(tensors, config)
    save_file(tensors, path / "model.safetensors")
    letters = {chr(ord("a") + i): i for i in range(26)} | {f"<{i}>": i for i in range(26, VOCAB)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(path / "tokenizer.json"))
    return path


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        "lm_head.weight": (VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{own}{norm}.weight"] = (WIDTH,)
        for part, width in widths.items():
            shapes[f"{own}self_attn.{part}_proj.weight"] = (width, WIDTH)
            if config.qkv_bias:
                shapes[f"{own}self_attn.{part}_proj.bias"] = (width,)
            if config.qk_norm and part != "v":
                shapes[f"{own}self_attn.{part}_norm.weight"] = (DIM,)
        shapes[f"{own}self_attn.o_proj.weight"] = (WIDTH, HEADS * DIM)
        shapes |= _feed_forward(config, layer, own)
    return shapes


def _feed_forward(config: ModelConfig, layer: int, own: str) -> dict[str, tuple[int, ...]]:
    sizes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    if not config.is_sparse(layer):
        names = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
        return {own + name: size for name, size in zip(names, sizes, strict=True)}
    router, experts, parts = expert_names(config)
    made: dict[str, tuple[int, ...]] = {own + router: (EXPERTS, WIDTH)}
    for expert in range(EXPERTS):
        for part, size in zip(parts, sizes, strict=True):
            made[f"{own}{experts}.{expert}.{part}"] = size
    return made
