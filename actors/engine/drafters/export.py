"""Writing drafters in the formats other engines load (spec 1.11 to 1.13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from actors.engine.drafters import speculators
from actors.engine.drafters.calibration import copy_tables
from actors.engine.drafters.checkpoint import EMBED, HEAD, load_drafter, write
from actors.engine.drafters.config import DrafterConfig, DSparkConfig
from actors.engine.drafters.model import DraftModel
from actors.engine.weights import CheckpointError, embedding_tables, read_config

Format = Literal["deepspec", "speculators"]
FORMATS: tuple[Format, ...] = ("deepspec", "speculators")
EAGLE3_TAPS = 5  # DeepSpec refuses any other number
# Of the target's own config: what a drafter's file must not say again.
_TARGET_ONLY = {"architectures", "quantization_config", "auto_map", "transformers_version"}


def export(drafter_dir: Path, target_dir: Path, format_: Format, out_dir: Path) -> dict[str, Any]:
    """Write the drafter in `drafter_dir`, made for the target in `target_dir`, to `out_dir`; returns a summary.

    Tensors are bf16. Raises CheckpointError, with the remedy, for a drafter the format cannot express.
    """
    model = load_drafter(drafter_dir, *embedding_tables(target_dir, torch.bfloat16))
    if out_dir.resolve() == drafter_dir.resolve():
        raise CheckpointError(f"--out {out_dir} is the drafter itself; name another directory")
    if not model.config.qk_norm:
        raise CheckpointError(
            f"{drafter_dir} has no q/k norms, which {format_} requires (Qwen3 layers); "
            "train a drafter with --qk-norm, the default"
        )
    config, tensors = _FORMATS[format_](model, target_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    write(out_dir, config, tensors)
    copy_tables(drafter_dir, out_dir)
    size = (out_dir / "model.safetensors").stat().st_size
    return {"format": format_, "kind": model.config.kind, "out": str(out_dir), "bytes": size}


def _deepspec(model: DraftModel, target_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = model.config
    if config.kind == "mtp":
        raise CheckpointError(
            "deepspec has no MTP drafters; export a DSpark, DFlash or EAGLE-3 one"
        )
    if config.reduced:
        raise CheckpointError(
            f"draft_vocab_size={config.draft_vocab_size}: deepspec drafters cover the whole vocabulary; "
            "use --format speculators, or train with --draft-vocab 0"
        )
    if config.kind == "eagle3" and len(config.target_layer_ids) != EAGLE3_TAPS:
        raise CheckpointError(
            f"target_layer_ids={config.target_layer_ids}: deepspec's EAGLE-3 taps {EAGLE3_TAPS} layers"
        )
    tensors = {**_parameters(model), EMBED: _stored(model.embed), HEAD: _stored(model.head)}
    return _deepspec_config(config, read_config(target_dir)), tensors


def _deepspec_config(config: DrafterConfig, target: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in target.items() if name not in _TARGET_ONLY}
    own = {**config.to_json(), "tied_to_target": False}
    for name in ("qk_norm", "tied_to_target", "draft_vocab_size"):
        del own[name]
    if isinstance(config, DSparkConfig):
        own |= {"layer_types": ["full_attention"] * config.num_hidden_layers, "num_anchors": 512}
        if not config.markov_rank:
            del own["markov_head_type"], own["confidence_head_with_markov"]
    else:
        del own["block_size"]
    return {
        **kept,
        **own,
        "model_type": "qwen3",
        "num_target_layers": int(target["num_hidden_layers"]),
        "dtype": "bfloat16",
    }


def _speculators(model: DraftModel, target_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = model.config
    if not isinstance(config, DSparkConfig):
        raise CheckpointError(
            f"{config.kind} drafters are not exported to speculators; use --format deepspec (EAGLE-3)"
        )
    tensors = _parameters(model)
    if config.reduced:
        tensors[HEAD] = _stored(model.head)
        tensors |= speculators.vocabulary_maps(model.draft_ids, config.vocab_size)
    return speculators.config_json(config, read_config(target_dir), str(target_dir.name)), tensors


def _parameters(model: DraftModel) -> dict[str, Tensor]:
    return {name: _stored(tensor) for name, tensor in model.state_dict().items()}


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.bfloat16).clone().contiguous()


_FORMATS = {"deepspec": _deepspec, "speculators": _speculators}
