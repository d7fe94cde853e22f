"""A Mixtral of random weights with a tokenizer, on disk. A token is a character."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LETTERS = string.ascii_letters + string.digits + string.punctuation + " "
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INNER, LAYERS, KV_HEADS, EXPERTS = 96, 2, 2, 4
MAX_LEN = 4096
VOCAB_SIZE = len(SPECIALS) + len(LETTERS)


@dataclass(frozen=True)
class Shape:
    """`value_scale`: what a token attends to beside the token itself. At 4, answers do not fall into a loop at once."""

    hidden: int = 64
    heads: int = 4
    head_dim: int = 16
    value_scale: float = 4.0


# Nearly all of a step is attention, which a rank of a group does for its own tokens; answers soon repeat themselves.
WIDE = Shape(hidden=1024, heads=128, head_dim=64, value_scale=0.4)


def write(folder: Path, shape: Shape = Shape()) -> Path:
    """The checkpoint; returns `folder`."""
    folder.mkdir(parents=True)
    symbols = [
        pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)[0][0]
        for letter in LETTERS
    ]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate([*SPECIALS, *symbols])}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": shape.head_dim,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LEN,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(_tensors(shape), folder / "model.safetensors")
    return folder


def _tensors(shape: Shape) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    hidden, width, kv_width = (
        shape.hidden,
        shape.heads * shape.head_dim,
        KV_HEADS * shape.head_dim,
    )

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn((rows, columns), generator=rng) * (scale * columns**-0.5)

    made = {
        "model.embed_tokens.weight": torch.randn((VOCAB_SIZE, hidden), generator=rng),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCAB_SIZE, hidden, 3.0),
    }
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        attention = f"{own}self_attn."
        made[f"{attention}q_proj.weight"] = normal(width, hidden, 2.0)
        made[f"{attention}k_proj.weight"] = normal(kv_width, hidden, 2.0)
        made[f"{attention}v_proj.weight"] = normal(kv_width, hidden, shape.value_scale)
        made[f"{attention}o_proj.weight"] = normal(hidden, width, shape.value_scale)
        made[f"{own}block_sparse_moe.gate.weight"] = normal(EXPERTS, hidden)
        for expert in range(EXPERTS):
            part = f"{own}block_sparse_moe.experts.{expert}."
            made[f"{part}w1.weight"] = normal(INNER, hidden)
            made[f"{part}w3.weight"] = normal(INNER, hidden)
            made[f"{part}w2.weight"] = normal(hidden, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{own}{norm}.weight"] = torch.ones(hidden)
    return made
