"""Writes tiny random checkpoints and what transformers makes of them. Run by an interpreter of its own, never imported.

usage: python -I transformers_oracle.py OUT_DIR [MODEL_DIR]     with MODEL_DIR: what it makes of that model instead
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 5000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biased": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    ),
    "qwen2": (Qwen2Config, {"rope_parameters": LINEAR}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_unnormalised": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 16, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": (MistralConfig, {"sliding_window": 12}),
    "qwen2_windowed": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3_layer_types": (
        Qwen3Config,
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe_windowed": (
        Qwen3MoeConfig,
        {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 5},
    ),
}
LENGTHS = (61, 9, 34, 48, 23)


def main(out_dir: Path) -> None:
    torch.set_num_threads(1)
    for seed, (name, (config_class, extra)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = config_class(**{**COMMON, **extra})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for tensor_name, tensor in model.named_parameters():
                if "norm" in tensor_name:
                    tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
                elif tensor_name.endswith("bias"):
                    tensor.copy_(0.3 * torch.randn_like(tensor))
        # The second model is written in several files, the way large ones come.
        shards = {"max_shard_size": "60KB"} if name == "llama_biased" else {}
        model.save_pretrained(out_dir / name, **shards)
        save_file(expectations(model, config), out_dir / name / "expected.bin")


@torch.no_grad()
def expectations(model: torch.nn.Module, config: object) -> dict[str, torch.Tensor]:
    found = {}
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(3, config.vocab_size, (1, length))
        out = model(ids, output_hidden_states=True, use_cache=False)
        found[f"ids.{row}"] = ids[0]
        found[f"logits.{row}"] = out.logits[0].float().contiguous()
        # hidden_states[0] is the embedding, [i + 1] the output of layer i; the last one is normed.
        found[f"taps.{row}"] = torch.cat([h[0] for h in out.hidden_states[1:3]], -1).contiguous()
    return found


def describe(out_dir: Path, model_dir: Path) -> None:
    """Random tokens, then a text the model writes itself: the near-certain and the undecided."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        prompt = torch.randint(0, model.config.vocab_size, (1, 24))
        written = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=-1)
        logits = model(written).logits[0].contiguous()
    save_file({"ids.0": written[0], "logits.0": logits}, out_dir / "expected.bin")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        describe(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
