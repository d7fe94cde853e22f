"""A drafter's first weights: the target's last layers, a draft vocabulary, a Markov code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.engine.drafters.checkpoint import build
from actors.engine.drafters.config import (
    DrafterConfig,
    DSparkConfig,
    Eagle3Config,
    Kind,
    MtpConfig,
    common_fields,
)
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.eagle3 import Eagle3Layer, Eagle3Model
from actors.engine.drafters.layers import Projections, RMSNorm
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.mtp import MtpModel
from actors.engine.drafters.pairs import PairModel
from actors.engine.weights import Checkpoint, CheckpointError, read_config

NOISE_STD = 0.02  # of weights there is nothing to copy for
NUM_PROBES = 512  # inputs that measure the scale of q and k


@dataclass(frozen=True)
class Shape:
    """What a user chooses about a new drafter; everything else is the target's."""

    kind: Kind = "dspark"
    gamma: int = 7
    num_layers: int = 2  # DSpark and DFlash
    markov_rank: int = 128  # DSpark
    markov_head: str = "vanilla"
    draft_vocab_size: int = 0  # 0: the whole vocabulary
    taps: tuple[int, ...] = ()  # MTP has its own: the last layer
    mask_token_id: int = 0
    qk_norm: bool = True
    confidence_head: bool = True


def config_for_target(model_dir: Path, shape: Shape) -> DrafterConfig:
    """Return a drafter config of this shape with the sizes of the target in `model_dir`.

    Raises CheckpointError naming a field that does not fit.
    """
    target: dict[str, Any] = read_config(model_dir)
    depth = int(target["num_hidden_layers"])
    common = {
        **common_fields({**target, "draft_vocab_size": shape.draft_vocab_size}),
        "target_layer_ids": (depth - 1,) if shape.kind == "mtp" else shape.taps,
        "qk_norm": shape.qk_norm,
        "tied_to_target": True,
        "num_hidden_layers": 1,
        "block_size": 1 if shape.kind == "mtp" else shape.gamma,
    }
    if shape.kind == "mtp":
        return MtpConfig(**common)
    if shape.kind == "eagle3":
        return Eagle3Config(**common)
    if shape.num_layers > depth:
        raise CheckpointError(f"--layers {shape.num_layers}: the target has only {depth} to copy")
    is_dspark = shape.kind == "dspark" and shape.markov_rank > 0
    common["num_hidden_layers"] = shape.num_layers
    return DSparkConfig(
        **common,
        mask_token_id=shape.mask_token_id,
        markov_rank=shape.markov_rank if is_dspark else 0,
        markov_head_type=shape.markov_head,
        enable_confidence_head=shape.kind == "dspark" and shape.confidence_head,
        confidence_head_with_markov=is_dspark,
    )


def choose_draft_ids(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids, ascending; unseen ids go by BPE rank (low is common)."""
    rank = torch.arange(len(counts), dtype=torch.float64)
    score = counts.double() + 0.5 / (1 + rank)
    return score.topk(size).indices.sort().values


@torch.no_grad()
def initialise_from_target(
    model: DraftModel, model_dir: Path, seed: int, features: Tensor | None = None
) -> None:
    """Copy the target's last layers and norms, and start what has no counterpart near zero effect.

    `features` [T, feature_dim] are real ones to measure the scale of q and k on (see `keep_scale`); without them
    random directions of the right norm serve. What is random depends on `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = Checkpoint(model_dir)
    depth = int(read_config(model_dir)["num_hidden_layers"])
    model.get_submodule("norm").get_parameter("weight").copy_(weights["model.norm.weight"].float())
    if isinstance(model, DSparkModel):
        _initialise_dspark(model, weights, depth, seed, generator)
    else:
        assert isinstance(model, PairModel)
        _initialise_pair(model, weights, depth, generator)
    if model.config.qk_norm:
        add_norms(model, features, generator)


@torch.no_grad()
def grow(
    start: DraftModel, gamma: int, *, qk_norm: bool, features: Tensor | None = None
) -> DraftModel:
    """Return a copy of a trained drafter that drafts blocks of `gamma`, to be trained on.

    No weight depends on the block size. With `qk_norm`, a drafter without q and k norms gets them at the scale its
    projections have (`keep_scale`, on `features` [T, feature_dim]). Raises CheckpointError for a drafter with tables
    of its own, which training does not keep.
    """
    if not start.config.tied_to_target:
        raise CheckpointError(
            "a warm start needs a drafter that uses its target's tables (tied_to_target): one of this project"
        )
    added = qk_norm and not start.config.qk_norm
    config = replace(start.config, block_size=gamma, qk_norm=start.config.qk_norm or qk_norm)
    head = start.embed.new_zeros(start.embed.shape)
    head[start.draft_ids] = start.head
    model = build(config, start.embed, head, start.draft_ids)
    model.load_state_dict(start.state_dict(), strict=not added)
    if added:
        add_norms(model, features, torch.Generator().manual_seed(1))
    return model


def add_norms(model: DraftModel, features: Tensor | None, generator: torch.Generator) -> None:
    """Give every layer's q and k norms the scale that `keep_scale` measures."""
    width = model.config.hidden_size
    probes = torch.randn((NUM_PROBES, width), generator=generator)
    if features is not None:
        probes = features[:, -width:].float()  # the tap nearest to what the copied layers read
    for layer in model.get_submodule("layers").children():
        keep_scale(layer, probes)


def _initialise_dspark(
    model: DSparkModel, weights: Checkpoint, depth: int, seed: int, generator: torch.Generator
) -> None:
    """Start `fc` as the identity on the last tap: the context then enters the first draft layer nearly as the
    target's own stream would, which trains faster than noise. W1 starts as principal components of the embeddings, so
    tokens of one kind share a code from the first step; W2 starts at zero, so the bias does too.
    """
    config = model.config
    for index, layer in enumerate(model.layers):
        _copy_layer(layer, weights, depth - config.num_hidden_layers + index)
    norm = weights[f"model.layers.{depth - 1}.input_layernorm.weight"]
    model.hidden_norm.weight.copy_(norm.float())
    _identity_on_last_tap(model.fc)
    if model.markov_head is not None:
        torch.manual_seed(seed)
        centred = model.embed.float() - model.embed.float().mean(0)
        _u, _s, basis = torch.pca_lowrank(centred, q=config.markov_rank, center=False)
        codes = centred @ basis
        model.markov_head.markov_w1.weight.copy_(codes / codes.std())
        model.markov_head.markov_w2.weight.zero_()
        for name, parameter in model.markov_head.named_parameters():
            if name.endswith("proj.weight"):
                parameter.normal_(0, NOISE_STD, generator=generator)
            elif name.endswith("proj.bias"):
                parameter.zero_()
    if model.confidence_head is not None:
        model.confidence_head.proj.weight.zero_()
        model.confidence_head.proj.bias.zero_()


def _initialise_pair(
    model: PairModel, weights: Checkpoint, depth: int, generator: torch.Generator
) -> None:
    """The hidden half of the input starts as the target's last layer reads it, the token half as noise."""
    width = model.config.hidden_size
    _copy_layer(model.layer, weights, depth - 1)
    if isinstance(model, Eagle3Model):
        _identity_on_last_tap(model.fc)
        norm = weights[f"model.layers.{depth - 1}.input_layernorm.weight"].float()
        model.layer.get_submodule("hidden_norm").get_parameter("weight").copy_(norm)
        model.layer.input_layernorm.weight.fill_(1.0)
    elif isinstance(model, MtpModel):
        noise = torch.randn((width, width), generator=generator) * NOISE_STD
        model.eh_proj.weight.copy_(torch.cat((torch.eye(width), noise), 1))
        model.hnorm.weight.fill_(1.0)
        model.enorm.weight.fill_(1.0)
    if isinstance(model, Eagle3Model):
        attention = model.layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            noise = torch.randn((projection.out_features, width), generator=generator) * NOISE_STD
            projection.weight[:, :width].copy_(noise)


def _copy_layer(layer: nn.Module, weights: Checkpoint, index: int) -> None:
    """Copy decoder layer `index`; a projection that is wider than the target's takes it at its end."""
    prefix = f"model.layers.{index}."
    for name, parameter in layer.named_parameters():
        if prefix + name in weights:
            source = weights[prefix + name].float()
            parameter[..., -source.shape[-1] :].copy_(source)


def _identity_on_last_tap(fc: nn.Linear) -> None:
    width = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -width:] = torch.eye(width)


@torch.no_grad()
def keep_scale(layer: nn.Module, probes: Tensor) -> None:
    """Set the q and k norms of a layer so that q and k keep, in the mean, the scale their projections give.

    A target without such norms lets each head's q be as long as the projection makes it; a norm weight of one would
    set them all to unit root mean square and change every attention. `probes` [T, hidden_size] are normed as the
    layer norms its input.
    """
    attention = layer.get_submodule("self_attn")
    # EAGLE-3 norms the hidden half of its input apart.
    norm = layer.hidden_norm if isinstance(layer, Eagle3Layer) else layer.input_layernorm
    assert isinstance(attention, Projections) and isinstance(norm, RMSNorm)
    x = F.rms_norm(probes, probes.shape[-1:], norm.weight, norm.eps)
    for own, projection in (
        (attention.q_norm, attention.q_proj),
        (attention.k_norm, attention.k_proj),
    ):
        weight = projection.weight[:, -x.shape[-1] :]  # the part that was copied
        heads = (x @ weight.T).view(len(x), -1, attention.head_dim)
        own.get_parameter("weight").fill_(float(heads.square().mean(-1).sqrt().mean()))
