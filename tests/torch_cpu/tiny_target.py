"""A two-layer target of random weights with an odd number of heads, on any device."""

from __future__ import annotations

from typing import Literal

import torch

from actors.engine.base import TargetSpec
from actors.engine.checkpoint import ModelConfig, RopeConfig
from actors.engine.target_engine import TorchTargetEngine
from actors.engine.target_model import TargetModel

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=60,
    hidden_size=24,
    intermediate_size=20,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    max_position=128,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    moe=None,
    eos_token_ids=(0,),
    windows=(0, 7),
)
TAPS = (0, 1)


def tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * 0.2

    hidden, inner, dim = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.head_dim
    made = {
        "model.embed_tokens.weight": normal(60, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(CONFIG.num_layers):
        own = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", 3 * dim, hidden),
            ("self_attn.k_proj", dim, hidden),
            ("self_attn.v_proj", dim, hidden),
            ("self_attn.o_proj", hidden, 3 * dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            made[f"{own}{name}.weight"] = normal(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{own}{norm}.weight"] = 1 + normal(hidden)
        for norm in ("q_norm", "k_norm"):
            made[f"{own}self_attn.{norm}.weight"] = 1 + normal(dim)
    return made


def tiny_engine(
    device: str, numerics: Literal["reproducible", "fast"] = "reproducible"
) -> TorchTargetEngine:
    model = TargetModel(
        CONFIG, tensors(), torch.float32, torch.device(device), numerics, max_len=128
    )
    spec = TargetSpec(
        "tiny", CONFIG.architecture, 60, 24, 2, 128, (0,), TAPS, "float32", device, numerics,
        64, 16, "x",
    )  # fmt: skip
    return TorchTargetEngine(model, model.new_store(64, 16), spec)
