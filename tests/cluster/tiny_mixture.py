"""A Mixtral of random weights with a tokenizer, on disk. A token is a character."""

from __future__ import annotations

import json
import string
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
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 64, 96, 2, 4, 2, 16, 4
MAX_LEN = 4096
VOCAB_SIZE = len(SPECIALS) + len(LETTERS)


def write(folder: Path) -> Path:
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
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
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
    save_file(_tensors(), folder / "model.safetensors")
    return folder


def _tensors() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(5)

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn((rows, columns), generator=rng) * (scale * columns**-0.5)

    made = {
        "model.embed_tokens.weight": torch.randn((VOCAB_SIZE, HIDDEN), generator=rng),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCAB_SIZE, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        attention = f"{own}self_attn."
        made[f"{attention}q_proj.weight"] = normal(HEADS * HEAD_DIM, HIDDEN, 2.0)
        made[f"{attention}k_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN, 2.0)
        # What a token attends to outweighs the token itself: answers do not fall into a loop at once.
        made[f"{attention}v_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN, 4.0)
        made[f"{attention}o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM, 4.0)
        made[f"{own}block_sparse_moe.gate.weight"] = normal(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            part = f"{own}block_sparse_moe.experts.{expert}."
            made[f"{part}w1.weight"] = normal(INNER, HIDDEN)
            made[f"{part}w3.weight"] = normal(INNER, HIDDEN)
            made[f"{part}w2.weight"] = normal(HIDDEN, INNER)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{own}{norm}.weight"] = torch.ones(HIDDEN)
    return made
