"""A tiny random Llama on disk, and two drafters for it: one that knows the texts, one real with random weights."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from actors.core.messages import CommitBatch, ProposalBatch
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.drafters.protocol import DrafterOptions
from tests.pure.scripted_drafter import DRAFTER

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 96, 32, 3, 4, 2, 64
TAPS = (0, 2)


def write_tiny_llama(path: Path) -> None:
    """A random Llama whose logits are spread enough for texts that do not repeat one token."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    head_dim = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN, scale=0.5),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        for name, (rows, columns) in shapes.items():
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, scale=1.2 / columns**0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))


@dataclass
class KnowingDrafter:
    """Proposes what the streams will be, each token wrong with probability `error`."""

    texts: Mapping[str, list[int]]
    gamma: int
    error: float
    rng: random.Random
    lenient: bool = False  # a stream may go another way than its text: then the block is noise

    def close(self, request_ids: tuple[str, ...]) -> None:
        pass

    def advance(self, commit: CommitBatch) -> ProposalBatch | None:
        wants = np.flatnonzero(commit.wants_block)
        if not len(wants):
            return None
        blocks = [self._block(commit, int(i)) for i in wants]
        draft = np.array(blocks, np.int32)
        confidences = [[self.rng.random() for _ in range(self.gamma)] for _ in wants]
        return ProposalBatch(
            DRAFTER.name,
            tuple(commit.request_ids[i] for i in wants),
            commit.generations[wants],
            commit.committed_lens[wants],
            draft,
            np.array(confidences, np.float32),
            draft[:, :, None],
            np.ones((*draft.shape, 1), np.float32),
            0.0,
        )

    def _block(self, commit: CommitBatch, index: int) -> list[int]:
        full = self.texts[commit.request_ids[index]]
        start = int(commit.committed_lens[index])
        assert self.lenient or full[start - 1] == commit.anchor_token_ids[index]
        known = [*full[start : start + self.gamma], *[0] * self.gamma][: self.gamma]
        return [
            self.rng.randrange(VOCAB) if self.rng.random() < self.error else token
            for token in known
        ]


def real_drafter_model(gamma: int) -> DSparkModel:
    """A DSpark drafter with random weights."""
    config = DSparkConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=256,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=gamma,
        mask_token_id=0,
        target_layer_ids=TAPS,
        markov_rank=4,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        qk_norm=False,
        tied_to_target=True,
    )
    torch.manual_seed(0)
    embed = torch.randn(VOCAB, HIDDEN)
    return DSparkModel(config, embed, torch.randn_like(embed), torch.arange(VOCAB))


def real_drafter(gamma: int) -> DSparkEngine:
    """An engine whose blocks are mostly wrong and whose messages are right."""
    model = real_drafter_model(gamma)
    options = DrafterOptions(DRAFTER.name, dtype=torch.float32, draft_top_k=8)
    return DSparkEngine(model, ConfidenceTables.identity(gamma), options, "test")
