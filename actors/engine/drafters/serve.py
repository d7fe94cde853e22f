"""From a drafter directory to a serving engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from actors.engine.base import DrafterEngine
from actors.engine.checkpoint import BUNDLED_MODELS_DIR, find_model
from actors.engine.drafters.calibration import (
    CALIBRATION_FILE,
    ConfidenceTables,
    read_tables,
)
from actors.engine.drafters.checkpoint import load_drafter, read_drafter_config
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.ngram import NgramEngine
from actors.engine.drafters.pair_engine import PairEngine
from actors.engine.drafters.pairs import PairModel
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.target_engine import DTYPES
from actors.engine.weights import CheckpointError, embedding_tables, read_config
from configs.recipe import read_recipe
from configs.schema import NGRAM_DRAFTER, ClusterConfig


def find_drafter(model_path: str, drafter: str | None) -> Path | None:
    """The directory of the drafter called `drafter` (a path, or "bundled" for the model's own); None without one.

    Raises CheckpointError when it is not there.
    """
    if drafter is None or drafter == NGRAM_DRAFTER:
        return None
    folders = [Path(drafter).expanduser()]
    if drafter == "bundled":
        recipe = read_recipe(model_path)
        if recipe is not None:  # an upcycled model's features are those of the dense one
            model_path = recipe.dense
        folders = [BUNDLED_MODELS_DIR / model_path / "drafter"] if "/" not in model_path else []
        folders.append(find_model(model_path, progress=False) / "drafter")
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"model.drafter={drafter!r}: no drafter in {folders[-1]}; train one, name its directory, "
        "or set model.drafter=null for plain decoding"
    )


def configured_taps(config: ClusterConfig) -> tuple[int, ...]:
    """Return the target layers whose outputs the configured drafter reads; () without one.

    Raises CheckpointError when it is not there.
    """
    folder = find_drafter(config.model.path, config.model.drafter)
    return () if folder is None else read_drafter_config(folder).target_layer_ids


def configured_engine(
    config: ClusterConfig, name: str, *, captures: bool = True
) -> DrafterEngine | None:
    """The configured drafter, cut to the configured block; None without one.

    `name` goes into its proposals. Raises CheckpointError for anything that is not there or does not fit.
    """
    gamma, draft_top_k = config.drafter.gamma, config.drafter.draft_top_k
    if config.model.drafter == NGRAM_DRAFTER:
        return NgramEngine(name, gamma, draft_top_k)
    folder = find_drafter(config.model.path, config.model.drafter)
    if folder is None:
        return None
    dtype, device = DTYPES[config.model.dtype], config.model.device
    options = DrafterOptions(name, gamma, draft_top_k, dtype, device, captures)
    return load_engine(folder, find_model(config.model.path, progress=False), options)


def check_drafter(config: ClusterConfig) -> dict[str, list[Any]]:
    """Load the configured drafter on the CPU; returns the "taps" it reads, and "remarks" on its confidences.

    Raises CheckpointError for anything that is not there or does not fit.
    """
    here = config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})
    engine = configured_engine(here, "check", captures=False)
    if engine is None:
        return {"taps": [], "remarks": []}
    taps, remarks = engine.spec.tap_layer_ids, []
    num_layers = int(
        read_config(find_model(config.model.path, progress=False))["num_hidden_layers"]
    )
    if taps and max(taps) >= num_layers:
        raise CheckpointError(
            f"target_layer_ids={list(taps)}: the target has {num_layers} layers; "
            "serve it with the target it was trained for"
        )
    folder = find_drafter(config.model.path, config.model.drafter)
    if engine.spec.num_refused_calibrations:
        remarks.append(f"{CALIBRATION_FILE} was made for other weights and is not used")
    elif folder is not None and not (folder / CALIBRATION_FILE).is_file():
        remarks.append(f"there is no {CALIBRATION_FILE}: confidences are corrected while serving")
    return {"taps": list(taps), "remarks": [f"{text}; run `dspark calibrate`" for text in remarks]}


def load_engine(drafter_dir: Path, target_dir: Path, options: DrafterOptions) -> DrafterEngine:
    """Load a drafter for the target whose Hugging Face directory is `target_dir`.

    The target's embedding and output head are read from there when the drafter is tied to them.
    Raises CheckpointError for anything that does not fit.
    """
    embed, head = embedding_tables(target_dir, options.dtype)
    model = load_drafter(drafter_dir, embed, head)
    tables = read_tables(drafter_dir, target_dir, model.config.block_size)
    return engine_for(model, tables, options, identity(drafter_dir, options))


def engine_for(
    model: DraftModel, tables: ConfidenceTables, options: DrafterOptions, identity: str
) -> DrafterEngine:
    """Return the serving engine of a loaded model.

    `tables` calibrate the logits of a confidence head; a drafter without one has no use for them.
    """
    if isinstance(model, DSparkModel):
        return DSparkEngine(model, tables, options, identity)
    assert isinstance(model, PairModel)
    return PairEngine(model, options, identity)


def identity(drafter_dir: Path, options: DrafterOptions) -> str:
    """Return a hash of what the cost and confidences of a drafter depend on."""
    digest = hashlib.sha256()
    for name in ("config.json", CALIBRATION_FILE, "model.safetensors"):
        path = drafter_dir / name
        if path.is_file():
            digest.update(path.read_bytes())
    digest.update(
        f"{options.dtype} {options.device} {options.gamma} {options.draft_top_k}".encode()
    )
    digest.update(str(torch.get_num_threads()).encode())
    return digest.hexdigest()[:16]
