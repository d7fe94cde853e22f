"""The speculators format of DSpark and DFlash drafters (spec 1.13): other field names, the target's tables left out.

Tensors carry DeepSpec's names. The output head is stored for a reduced vocabulary only, with one row a draft id;
embedding, full head and the target's final norm (`verifier_*`) are the target's own and may be absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.engine.drafters.config import DrafterConfig, DSparkConfig, bad, integer

TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
TYPES = ("dspark", "dflash")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is in this format."""
    return TYPE in raw or LAYER in raw


def parse(raw: Mapping[str, Any]) -> DSparkConfig:
    """Read a speculators `config.json`; CheckpointError names a bad field.

    `aux_hidden_state_layer_ids` count the embedding output as 0, so a decoder layer i is i + 1 there.
    """
    kind = raw.get(TYPE)
    if kind not in TYPES:
        raise bad(TYPE, kind, f"only {TYPES} load from this format")
    layer = raw.get(LAYER)
    if not isinstance(layer, Mapping):
        raise bad(LAYER, layer, "give the draft layer's config as an object")
    if raw.get("sample_from_anchor", False) is not True:
        raise bad(
            "sample_from_anchor",
            raw.get("sample_from_anchor"),
            "only drafters that predict from the anchor's own slot load; absent counts as false here",
        )
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and i > 0 for i in ids):
        raise bad("aux_hidden_state_layer_ids", ids, "list decoder layers, counted from 1")
    if raw.get("target_hidden_size") not in (None, layer.get("hidden_size")):
        raise bad("target_hidden_size", raw["target_hidden_size"], "must equal hidden_size")
    return DSparkConfig.parse(
        {
            **layer,
            "draft_vocab_size": raw.get("draft_vocab_size", 32_000),
            "block_size": integer(raw, "block_size"),
            "mask_token_id": integer(raw, "mask_token_id"),
            "target_layer_ids": [i - 1 for i in ids],
            "markov_rank": raw.get("markov_rank", 0),
            "markov_head_type": raw.get("markov_head_type", "vanilla"),
            "enable_confidence_head": raw.get("enable_confidence_head", False),
            "confidence_head_with_markov": raw.get("confidence_head_with_markov", False),
            "qk_norm": True,
            "tied_to_target": True,
        }
    )


def tables(config: DrafterConfig) -> tuple[set[str], set[str]]:
    """Return (tensors that must be there, tensors that may be) beside the learned ones and d2t."""
    verifier = {"verifier_norm.weight", "verifier_lm_head.weight", "t2d"}
    if config.reduced:
        return {"lm_head.weight"}, {"embed_tokens.weight", *verifier}
    return set(), {"embed_tokens.weight", "lm_head.weight", "d2t", *verifier}


def config_json(
    config: DSparkConfig, target: Mapping[str, Any], target_name: str
) -> dict[str, Any]:
    """Return the `config.json` of `config` in this format; `target` is the target's."""
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    layer = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    verifier = {"name_or_path": target_name, "architectures": target.get("architectures", [])}
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        TYPE: kind,
        LAYER: layer,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t [Vd] (offsets) and t2d [V] (whether a target id can be drafted)."""
    can_be_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    can_be_drafted[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": can_be_drafted}
