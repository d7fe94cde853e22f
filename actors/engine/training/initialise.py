"""A drafter's first weights: the target's last layers, a draft vocabulary, a Markov code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.weights import Checkpoint, read_config


def config_for_target(
    model_dir: Path,
    *,
    taps: tuple[int, ...],
    num_layers: int,
    block_size: int,
    draft_vocab_size: int,
    markov_rank: int,
    mask_token_id: int,
) -> DSparkConfig:
    """Return a drafter config with the sizes of the target in `model_dir` and no q/k norms."""
    target: dict[str, Any] = read_config(model_dir)
    base = DSparkConfig.parse(
        {
            **target,
            "architectures": ["LlamaDSparkModel"],
            "num_hidden_layers": num_layers,
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": taps,
            "draft_vocab_size": draft_vocab_size,
            "markov_rank": markov_rank,
            "enable_confidence_head": True,
            "confidence_head_with_markov": markov_rank > 0,
            "tied_to_target": True,
        }
    )
    return replace(base, qk_norm=False)


def choose_draft_ids(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids, ascending; unseen ids go by BPE rank (low is common)."""
    rank = torch.arange(len(counts), dtype=torch.float64)
    score = counts.double() + 0.5 / (1 + rank)
    return score.topk(size).indices.sort().values


@torch.no_grad()
def initialise_from_target(model: DSparkModel, model_dir: Path, seed: int) -> None:
    """Copy the target's last layers and norms; start `fc` as the identity on the last tap.

    The context then enters the first draft layer nearly as the target's own stream would, which
    trains faster than noise. W1 starts as principal components of the embeddings, so tokens of one
    kind share a code from the first step; W2 starts at zero, so the bias does too.
    """
    config = model.config
    weights = Checkpoint(model_dir)
    depth = int(read_config(model_dir)["num_hidden_layers"])
    first = depth - config.num_hidden_layers
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{first + index}."
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[prefix + name].float())
    model.norm.weight.copy_(weights["model.norm.weight"].float())
    model.hidden_norm.weight.copy_(
        weights[f"model.layers.{depth - 1}.input_layernorm.weight"].float()
    )
    model.fc.weight.zero_()
    model.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    if model.markov_head is not None:
        torch.manual_seed(seed)
        centred = model.embed.float() - model.embed.float().mean(0)
        _u, _s, basis = torch.pca_lowrank(centred, q=config.markov_rank, center=False)
        codes = centred @ basis
        model.markov_head.markov_w1.weight.copy_(codes / codes.std())
        model.markov_head.markov_w2.weight.zero_()
    if model.confidence_head is not None:
        model.confidence_head.proj.weight.zero_()
        model.confidence_head.proj.bias.zero_()
