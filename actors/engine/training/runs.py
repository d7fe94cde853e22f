"""A training run as files and functions, whatever starts its stages: the module's command, or `dspark`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from actors.engine.drafters.checkpoint import build, load_drafter
from actors.engine.drafters.config import DrafterConfig, Kind, parse_config
from actors.engine.drafters.model import DraftModel
from actors.engine.training import evaluate, initialise, prompts
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.replay import Acceptance
from actors.engine.training.validation import HeldOut
from actors.engine.weights import Checkpoint, CheckpointError, embedding_tables
from configs.machine import multiplies_bfloat16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Paths:
    """Where a training run keeps its files, outside the repository."""

    work: Path
    target: Path
    run_name: str
    is_bundled: bool = False  # the target is SmolLM2-135M, as the bundled drafters had it

    @property
    def facts(self) -> Path:
        """What the text was written with."""
        return self.work / "text.json"

    def prompts(self, split: str) -> Path:
        """The prompt list of `split`."""
        return self.work / f"{split}.jsonl"

    def shards(self, split: str) -> Path:
        """The on-policy shards of `split`."""
        return self.work / split

    @property
    def run(self) -> Path:
        """Checkpoint, log and curve."""
        return self.work / f"run-{self.run_name}"


def compute_dtype() -> torch.dtype:
    """Return the format that this machine multiplies matrices in fastest."""
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def tables(target: Path) -> tuple[Tensor, Tensor]:
    """Return the target's (embed, output head) in the format training computes in."""
    return embedding_tables(target, compute_dtype())


def warm_model(
    paths: Paths, data: OnPolicyDataset, start: Path, shape: initialise.Shape
) -> DraftModel:
    """Return the drafter in `start` with `shape`'s block size, and its q/k norms where it asks for them.

    Layers, rank, head, taps and vocabulary stay what they are. Raises CheckpointError for another kind.
    """
    old = load_drafter(start, *tables(paths.target))
    if old.config.kind != shape.kind:
        raise CheckpointError(f"{start} is a {old.config.kind} drafter, not --kind {shape.kind}")
    features = checked_features(data, old.config)
    gamma = 1 if old.config.kind == "mtp" else shape.gamma
    return initialise.grow(old, gamma, qk_norm=shape.qk_norm, features=features)


def checked_features(data: OnPolicyDataset, config: DrafterConfig) -> Tensor:
    """Return the features of one record; CheckpointError when the drafter reads others."""
    features = data.features(data.read(data.records[0]))
    if features.shape[1] != config.feature_dim:
        raise CheckpointError(
            f"{data.root} holds features {features.shape[1]} wide, --taps {config.target_layer_ids} makes "
            f"{config.feature_dim}; give the taps the text was generated with"
        )
    return features


def new_model(paths: Paths, data: OnPolicyDataset, shape: initialise.Shape) -> DraftModel:
    """Return a drafter at its starting weights, its vocabulary chosen from text and prompts."""
    config = initialise.config_for_target(paths.target, shape)
    embed, head = tables(paths.target)
    chosen = torch.arange(config.vocab_size)
    if config.reduced:
        counts = data.token_counts(config.vocab_size)
        tokenizer = Tokenizer.from_file(str(paths.target / "tokenizer.json"))
        listed = paths.prompts("train")
        for prompt in (
            prompts.read(listed) if listed.is_file() else ()
        ):  # those not answered yet, too
            ids = torch.tensor(tokenizer.encode(prompt.text, add_special_tokens=False).ids)
            counts.index_add_(0, ids, torch.full((len(ids),), 0.25))
        chosen = initialise.choose_draft_ids(counts, config.draft_vocab_size)
    model = build(config, embed, head, chosen)
    features = checked_features(data, config)
    initialise.initialise_from_target(model, paths.target, seed=1, features=features)
    return model


def restore(paths: Paths, state: dict[str, Any]) -> DraftModel:
    """Return the model of a checkpoint."""
    embed, head = tables(paths.target)
    model = build(parse_config(state["config"]), embed, head, state["draft_ids"])
    model.load_state_dict(state["model"])
    return model


def dataset(
    paths: Paths, split: str, kind: Kind, shards: list[str] | None = None
) -> OnPolicyDataset:
    """Return the shards of a split with the features that this kind of drafter reads."""
    final_norm = Checkpoint(paths.target)["model.norm.weight"] if kind == "mtp" else None
    return OnPolicyDataset(paths.shards(split), shards, final_norm)


def held_out(paths: Paths, kind: Kind, per_domain: int) -> HeldOut | None:
    """Return what to measure while training; None, with a warning, where no held-out text is."""
    try:
        data = dataset(paths, "held_out", kind)
    except FileNotFoundError as missing:
        log.warning("training without held-out measurements: %s", missing)
        return None
    return HeldOut(data, per_domain, bf16=multiplies_bfloat16())


def gammas(block_size: int) -> tuple[int, ...]:
    """Return the numbers of draft tokens to report acceptance for."""
    return tuple(sorted({min(3, block_size), block_size}))


def report(result: dict[str, dict[int, Acceptance]]) -> dict[str, Any]:
    """Return acceptance lengths by domain and gamma, and their mean over domains."""
    gammas = sorted(next(iter(result.values())))
    by_domain = {
        domain: {f"gamma_{g}": round(tally[g].length, 3) for g in gammas}
        for domain, tally in sorted(result.items())
    }
    means = {f"gamma_{g}": round(evaluate.macro(result, g), 3) for g in gammas}
    return {"acceptance_length": {**by_domain, "macro": means}}
