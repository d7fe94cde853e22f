"""Drafter files as DeepSpec and speculators write them: names and shapes of spec 1.11 to 1.13, filled with noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, D, FFN, HEADS, KV_HEADS, HEAD_DIM, RANK, TAPS, REDUCED = 96, 32, 48, 4, 2, 8, 6, 5, 40
Shapes = dict[str, tuple[int, ...]]

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "vocab_size": V,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
DSPARK: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 9,
    "layer_types": ["full_attention"] * 2,
    "block_size": 5,
    "mask_token_id": 1,
    "num_anchors": 512,
    "target_layer_ids": [0, 2, 4, 5, 7],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH: dict[str, Any] = {
    **{k: v for k, v in DSPARK.items() if not k.startswith(("markov_head", "confidence_head"))},
    "markov_rank": 0,
    "enable_confidence_head": False,
}
EAGLE3: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3Eagle3Model"],
    "num_hidden_layers": 9,  # the target's, as DeepSpec leaves it
    "draft_num_hidden_layers": 1,
    "target_layer_ids": [0, 2, 4, 5, 7],
    "ttt_length": 7,
    "step_loss_decay": 0.8,
    "target_model_name_or_path": "some/target",
}
DEEPSPEC: dict[str, dict[str, Any]] = {
    "vanilla": DSPARK,
    "gated": {**DSPARK, "markov_head_type": "gated"},
    "rnn": {**DSPARK, "markov_head_type": "rnn"},
    "no-markov-confidence": {**DSPARK, "confidence_head_with_markov": False},
    "dflash": DFLASH,
    "eagle3": EAGLE3,
}


def layer_shapes(prefix: str, width: int = D) -> Shapes:
    return {
        f"{prefix}input_layernorm.weight": (D,),
        f"{prefix}post_attention_layernorm.weight": (D,),
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.o_proj.weight": (D, HEADS * HEAD_DIM),
        f"{prefix}self_attn.q_norm.weight": (HEAD_DIM,),
        f"{prefix}self_attn.k_norm.weight": (HEAD_DIM,),
        f"{prefix}mlp.gate_proj.weight": (FFN, D),
        f"{prefix}mlp.up_proj.weight": (FFN, D),
        f"{prefix}mlp.down_proj.weight": (D, FFN),
    }


def deepspec_shapes(kind: str) -> Shapes:
    """Every tensor of a DeepSpec file of this kind (a key of DEEPSPEC)."""
    shapes: Shapes = {
        "embed_tokens.weight": (V, D),
        "lm_head.weight": (V, D),
        "fc.weight": (D, TAPS * D),
        "norm.weight": (D,),
    }
    if kind == "eagle3":
        return shapes | layer_shapes("layers.0.", 2 * D) | {"layers.0.hidden_norm.weight": (D,)}
    shapes["hidden_norm.weight"] = (D,)
    for i in range(2):
        shapes |= layer_shapes(f"layers.{i}.")
    if kind == "dflash":
        return shapes
    shapes |= {
        "markov_head.markov_w1.weight": (V, RANK),
        "markov_head.markov_w2.weight": (V, RANK),
        "confidence_head.proj.weight": (1, D if kind == "no-markov-confidence" else D + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (RANK, D + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + D),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def speculators_config(reduced: bool, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**QWEN3, "num_hidden_layers": 2},
        "draft_vocab_size": REDUCED if reduced else V,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [1, 3, 5, 6, 8],
        "mask_token_id": 1,
        "sample_from_anchor": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "speculators_config": {"algorithm": "dspark"},
    }
    return config | changes


def speculators_shapes(reduced: bool) -> Shapes:
    """W1 over the target's vocabulary, W2 and output head over the draft's; the target's tables left out."""
    shapes = deepspec_shapes("vanilla")
    del shapes["embed_tokens.weight"], shapes["lm_head.weight"]
    if reduced:
        shapes |= {
            "markov_head.markov_w2.weight": (REDUCED, RANK),
            "lm_head.weight": (REDUCED, D),
            "d2t": (REDUCED,),
            "t2d": (V,),
        }
    return shapes


def noise(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """bf16 noise of these shapes; d2t and t2d make sense."""
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }
    if "d2t" in made:
        ids = torch.randperm(V, generator=generator)[:REDUCED].sort().values
        made["d2t"] = ids - torch.arange(REDUCED)
        made["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return made


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
