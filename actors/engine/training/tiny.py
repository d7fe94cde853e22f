"""A tiny target to try everything on: a Qwen3 of a million weights, taught for a minute on this repository's own text.

It continues what it is shown, poorly, but in words that follow from each other: there is something to draft. No
network, no data set. What it is good for is `docs/train.md` and tests.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from actors.engine.drafters.config import DrafterConfig, common_fields
from actors.engine.drafters.layers import MLP, Projections, RMSNorm
from actors.engine.rotary import rotary_tables
from actors.engine.weights import CheckpointError

ROOT = Path(__file__).resolve().parents[3]
VOCAB, CONTEXT, ROWS, RATE = 1024, 64, 8, 3e-3
PAD, USER, ANSWER, END = "<|pad|>", "<|user|>", "<|answer|>", "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ ('" + USER + "' if m['role'] == 'user' else '" + ANSWER + "')"
    " + m['content'] + ('" + END + "' if m['role'] == 'assistant' else '') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ANSWER + "' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "pad_token_id": 0,
    "eos_token_id": 3,
}
LINES_SHOWN, LINES_ASKED, NUM_PROMPTS = 12, 2, 400


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Projections(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, d]."""
        normed, attention = self.input_layernorm(x), self.self_attn
        q = attention.queries(normed, cos, sin)
        k, v = attention.keys_values(normed, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Decoder(nn.Module):
    """Parameters carry the checkpoint's names, without `model.`."""

    def __init__(self) -> None:
        super().__init__()
        shape = {**common_fields(CONFIG), "block_size": 1, "target_layer_ids": (0,)}
        config = DrafterConfig(**shape, num_hidden_layers=CONFIG["num_hidden_layers"])
        self.embed_tokens = nn.Embedding(VOCAB, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.04)
        self.tables = rotary_tables(config.head_dim, config.rope_theta, CONTEXT)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, S, V] of ids [B, S]."""
        x = self.embed_tokens(ids)
        cos, sin = (t[: ids.shape[1], None] for t in self.tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def write(out: Path | None, seconds: float, seed: int = 1) -> dict[str, Any]:
    """Write the target's directory and `prompts.jsonl` beside its weights; returns its last loss and the steps made.

    Raises CheckpointError when `out` is missing or taken.
    """
    if out is None or (out.exists() and any(out.iterdir())):
        raise CheckpointError(f"--out {out}: name a new folder for the tiny target")
    out.mkdir(parents=True, exist_ok=True)
    pieces = list(_pieces())
    tokenizer = _tokenizer(pieces)
    stream = [i for asked, rest in pieces for i in _encode(tokenizer, asked, rest)]
    torch.manual_seed(seed)
    model = _Decoder()
    loss, steps = _teach(model, torch.tensor(stream), seconds)
    tensors = {f"model.{n}": p.detach().bfloat16() for n, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    asked = random.Random(seed).sample(pieces, min(NUM_PROMPTS, len(pieces)))
    lines = [json.dumps({"text": text, "domain": "own"}) + "\n" for text, _ in asked]
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"target": str(out), "steps": steps, "loss": round(loss, 3), "prompts": len(lines)}


def _pieces() -> Iterator[tuple[str, str]]:
    """Some lines of a file of this repository, and those that follow."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    files += [f for room in ("actors/core", "configs") for f in ROOT.glob(f"{room}/**/*.py")]
    for file in sorted(files):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for at in range(0, len(lines) - LINES_SHOWN, LINES_SHOWN):
            part = lines[at : at + LINES_SHOWN]
            yield "\n".join(part[:LINES_ASKED]), "\n".join(part[LINES_ASKED:])


def _tokenizer(pieces: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, USER, ANSWER, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(s, special=True) for s in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n".join(piece) for piece in pieces), trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, asked: str, rest: str) -> list[int]:
    ids: list[int] = tokenizer.encode(f"{USER}{asked}{ANSWER}{rest}{END}").ids
    return ids


def _teach(model: _Decoder, stream: Tensor, seconds: float) -> tuple[float, int]:
    """Train for so many seconds of CPU time, at least a step; returns (mean of the last losses, steps)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    started, steps, losses = time.process_time(), 0, [0.0]
    bar = tqdm(total=round(seconds), desc="tiny target", unit="s", mininterval=1.0)
    while steps == 0 or time.process_time() - started < seconds:
        spent = time.process_time() - started
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / 20) * max(0.05, 1 - spent / max(seconds, 1))
        at = torch.randint(len(stream) - CONTEXT - 1, (ROWS, 1)) + torch.arange(CONTEXT + 1)
        ids = stream[at]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[-19:], loss.item()] if steps else [loss.item()]
        steps += 1
        bar.n = min(round(time.process_time() - started), round(seconds))
        bar.set_postfix(loss=f"{loss.item():.2f}")
    bar.close()
    return sum(losses) / len(losses), steps
