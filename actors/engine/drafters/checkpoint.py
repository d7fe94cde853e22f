"""Reading and writing drafters: DeepSpec's tensor names (spec 1.12), checked one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.engine.drafters import eight_bit, speculators
from actors.engine.drafters.config import DrafterConfig, parse_config
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.eagle3 import Eagle3Model
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.mtp import MtpModel
from actors.engine.weights import Checkpoint, CheckpointError, check_names, read_config

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
# Offset of each draft id to its target id: target = draft + d2t[draft] (spec 1.13).
MAP = "d2t"

_MODELS: dict[str, Callable[..., DraftModel]] = {
    "dspark": DSparkModel,
    "dflash": DSparkModel,
    "eagle3": Eagle3Model,
    "mtp": MtpModel,
}


def build(config: DrafterConfig, embed: Tensor, head: Tensor, draft_ids: Tensor) -> DraftModel:
    """Return an untrained model of the kind that `config` is; see `DraftModel` for the tables."""
    return _MODELS[config.kind](config, embed, head, draft_ids)


def read_drafter_config(drafter_dir: Path) -> DrafterConfig:
    """Return what a drafter directory declares, in whichever format it is written."""
    raw = read_config(drafter_dir)
    return speculators.parse(raw) if speculators.is_speculators(raw) else parse_config(raw)


def load_drafter(drafter_dir: Path, target_embed: Tensor, target_head: Tensor) -> DraftModel:
    """Load a drafter directory onto the target's embed [V, d] and output head [V, d].

    This project's directories, DeepSpec's and speculators' load. A DeepSpec checkpoint brings its own copies of the
    target's tables and uses those. Parameters are fp32 in memory, also where they are stored in eight bits
    (`eight_bit`). Raises CheckpointError naming any field, or any missing, extra, misshapen or badly scaled tensor.
    """
    config = read_drafter_config(drafter_dir)
    checkpoint = Checkpoint(drafter_dir)
    foreign = speculators.is_speculators(read_config(drafter_dir))
    own = set() if config.tied_to_target else {EMBED, HEAD}
    mapping = {MAP} if config.reduced else set()
    optional = {EMBED, HEAD, "t2d"} - own
    if foreign:
        own, optional = speculators.tables(config)
    full = (config.vocab_size, config.hidden_size)
    if config.tied_to_target:
        _check_tables(target_embed, target_head, full)
    with torch.device("meta"):
        shapes = _parameter_shapes(config)
    scales = eight_bit.scales_in(checkpoint) & {n + eight_bit.SCALE for n in shapes}
    check_names(checkpoint, set(shapes) | own | mapping, optional=optional | scales)
    state = {n: eight_bit.take(checkpoint, n, shape) for n, shape in shapes.items()}
    embed, head = target_embed, target_head
    if not config.tied_to_target:
        embed = checkpoint.take(EMBED, full, target_embed.dtype)
        head = checkpoint.take(HEAD, full, target_head.dtype)
    model = build(config, embed, head, _draft_ids(checkpoint, config))
    model.load_state_dict(state)
    if foreign and HEAD in checkpoint:
        rows = (config.draft_vocab_size, config.hidden_size)
        model.head = checkpoint.take(HEAD, rows, target_head.dtype)
    return model


def save_drafter(
    model: DraftModel,
    drafter_dir: Path,
    extra: Mapping[str, Any] | None = None,
    *,
    in_eight_bits: bool = False,
) -> None:
    """Write `config.json` (plus `extra` fields) and `model.safetensors`, without tied tensors.

    Weights are bf16, or with `in_eight_bits` what `eight_bit.compress` makes of the matrices.
    """
    drafter_dir.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().contiguous() for n, p in model.state_dict().items()}
    halved = {n: p.to(torch.bfloat16) for n, p in state.items()}
    tensors = eight_bit.compress(state) if in_eight_bits else halved
    if model.config.reduced:
        tensors[MAP] = model.draft_ids - torch.arange(model.config.draft_vocab_size)
    write(drafter_dir, {**model.config.to_json(), **(extra or {})}, tensors)


def write(drafter_dir: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the two files of a drafter directory, which must exist."""
    save_file(tensors, drafter_dir / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (drafter_dir / "config.json").write_text(text, encoding="utf-8")


def _check_tables(embed: Tensor, head: Tensor, full: tuple[int, int]) -> None:
    for name, tensor in (("embedding", embed), ("output head", head)):
        if tuple(tensor.shape) != full:
            raise CheckpointError(
                f"the target's {name} is {list(tensor.shape)}, this drafter needs {list(full)}; "
                "serve it with the target it was trained for"
            )


def _parameter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every learned tensor of a drafter with this config."""
    empty = torch.empty((config.vocab_size, config.hidden_size), device="meta")
    ids = torch.empty(config.draft_vocab_size, dtype=torch.long, device="meta")
    model = build(config, empty, empty, ids)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _draft_ids(checkpoint: Checkpoint, config: DrafterConfig) -> Tensor:
    """Return the target id of each draft id; the identity for a full-vocabulary drafter."""
    own = torch.arange(config.draft_vocab_size)
    if not config.reduced:
        return own
    ids = own + checkpoint.take(MAP, (config.draft_vocab_size,), torch.long)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"tensor {MAP!r} in {checkpoint.model_dir} maps draft ids outside the vocabulary or "
            "twice to the same token; export the drafter again"
        )
    return ids
