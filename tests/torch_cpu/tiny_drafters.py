"""Small drafters of every kind with random weights, and the commits a target would send them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.core.messages import CommitBatch, Endpoint
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.checkpoint import build
from actors.engine.drafters.config import DrafterConfig, DSparkConfig, Eagle3Config, MtpConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.pair_engine import PairEngine
from actors.engine.drafters.pairs import PairModel
from actors.engine.drafters.protocol import DrafterOptions

GREEDY = SamplingParams(temperature=0.0)
RANK = Endpoint("rank-0", "target", "inproc://rank-0", "", "e")

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "vocab_size": 96,
    "draft_vocab_size": 64,
    "block_size": 5,
    "target_layer_ids": (0, 2),
    "qk_norm": False,
    "tied_to_target": True,
}


def tiny_config(**changes: Any) -> DSparkConfig:
    config = DSparkConfig(
        **COMMON,
        mask_token_id=1,
        markov_rank=6,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    return replace(config, **changes)


def eagle3_config(**changes: Any) -> Eagle3Config:
    return Eagle3Config(**{**COMMON, "num_hidden_layers": 1, **changes})


def mtp_config(**changes: Any) -> MtpConfig:
    own = {"num_hidden_layers": 1, "block_size": 1, "target_layer_ids": (2,)}
    return MtpConfig(**{**COMMON, **own, **changes})


DFLASH: dict[str, Any] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}


def every_config(**changes: Any) -> dict[str, DrafterConfig]:
    """One of each kind and head."""
    return {
        "vanilla": tiny_config(**changes),
        "gated": tiny_config(markov_head_type="gated", **changes),
        "rnn": tiny_config(markov_head_type="rnn", **changes),
        "headless": tiny_config(
            enable_confidence_head=False, confidence_head_with_markov=False, **changes
        ),
        "dflash": tiny_config(**{**DFLASH, **changes}),
        "eagle3": eagle3_config(**changes),
        "mtp": mtp_config(**{**changes, "block_size": 1, "target_layer_ids": (2,)}),
    }


def random_model(config: DrafterConfig, std: float = 0.3) -> DraftModel:
    """A model whose every weight is noise, for a random part of the vocabulary."""
    torch.manual_seed(0)
    embed = torch.randn(config.vocab_size, config.hidden_size)
    ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    if not config.reduced:
        ids = torch.arange(config.vocab_size)
    model = build(config, embed, torch.randn_like(embed), ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.requires_grad_(False)


def tiny_model(config: DSparkConfig) -> DSparkModel:
    model = random_model(config)
    assert isinstance(model, DSparkModel)
    return model


def tiny_pair_model(config: DrafterConfig) -> PairModel:
    model = random_model(config)
    assert isinstance(model, PairModel)
    return model


def options(**changes: Any) -> DrafterOptions:
    return replace(DrafterOptions("tiny", dtype=torch.float32, draft_top_k=8), **changes)


def tiny_engine(model: DSparkModel, **changes: Any) -> DSparkEngine:
    return DSparkEngine(
        model, ConfidenceTables.identity(model.config.block_size), options(**changes), "test"
    )


def pair_engine(model: PairModel, **changes: Any) -> PairEngine:
    return PairEngine(model, options(**changes), "test")


class Entry(NamedTuple):
    """What one step committed for one request."""

    name: str
    committed: int
    first: int
    rows: Tensor
    anchor: int
    ids: Tensor
    verified: int = 0


class Stream:
    """A request as the target sees it: every token with its features, and how far it has sent them."""

    def __init__(self, name: str, length: int, config: DrafterConfig, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.name = name
        self.ids = torch.randint(0, config.vocab_size, (length,), generator=generator)
        self.features = torch.randn((length, config.feature_dim), generator=generator)

    def commit(self, first: int, committed: int, verified: int = 0) -> Entry:
        own = slice(first, committed - 1)
        anchor = int(self.ids[committed - 1])
        return Entry(
            self.name, committed, first, self.features[own], anchor, self.ids[own], verified
        )


def commit_batch(
    entries: list[Entry],
    wants: bool = True,
    params: SamplingParams = GREEDY,
    generation: int = 0,
    min_survival: float = 0.0,
) -> CommitBatch:
    counts = [len(e.rows) for e in entries]
    number = len(entries)
    return CommitBatch(
        rank=RANK,
        step=0,
        request_ids=tuple(e.name for e in entries),
        generations=np.full(number, generation, np.int32),
        committed_lens=np.array([e.committed for e in entries], np.int32),
        anchor_token_ids=np.array([e.anchor for e in entries], np.int32),
        wants_block=np.full(number, wants),
        first_positions=np.array([e.first for e in entries], np.int32),
        cu_feature_len=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        token_ids=torch.cat([e.ids for e in entries]).int().numpy(),
        features=torch.cat([e.rows for e in entries]).numpy(),
        verify_lens=np.array([e.verified for e in entries], np.int32),
        sampling=SamplingBatch.of([params] * number),
        min_survivals=np.full(number, min_survival, np.float32),
    )
