"""A dense model as a mixture of equal experts, in Mixtral's layout: real text and real dispatch with an exact oracle.

Every feed-forward is written `num_experts` times. A token's weights over the experts it visits sum to one, so whichever
it visits, the sum is what the dense layer gives. Routers are noise made orthogonal to the mean of what they see, which
spreads the load evenly; `skew` adds that mean back, more for the first experts than for the last.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from actors.engine import gguf_import
from actors.engine.checkpoint import (
    BUNDLED_MODELS_DIR,
    ModelConfig,
    find_model,
    model_config,
)
from actors.engine.config_fields import UnsupportedModelError
from actors.engine.router_probe import LayerInputs, layer_inputs
from actors.engine.weights import INDEX_FILE, Checkpoint, CheckpointError, read_config
from configs.recipe import UpcycleRecipe

_FEED_FORWARD = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")
_EXPERT_PART = {"gate": "w1", "up": "w3", "down": "w2"}
_TEXT_FILES = ("tokenizer*", "*.jinja", "generation_config.json", "special_tokens_map.json")
_DESCRIBING_FILES = ("LICENSE*", "NOTICE*")


def ensure_upcycled(
    name: str, recipe: UpcycleRecipe, cache_dir: Path | None = None, *, progress: bool = True
) -> Path:
    """The directory of the bundled model `name` under `cache_dir`, made on first use; anew when its recipe changed.

    Raises CheckpointError when the dense model cannot be had or the disk is full.
    """
    final = (cache_dir or gguf_import.DEFAULT_CACHE).expanduser() / name
    if gguf_import.is_complete(final):
        if read_config(final).get("upcycled") == recipe.model_dump():
            return final
        shutil.rmtree(final)
    upcycle(recipe, final, progress=progress)
    return final


def upcycle(recipe: UpcycleRecipe, out_dir: Path, *, progress: bool = True) -> Path:
    """Write the mixture to `out_dir`, which must not exist; it gets its name when it is complete.

    Raises UnsupportedModelError for a model that Mixtral's layout cannot hold, CheckpointError when it is absent,
    when `out_dir` exists, or when it cannot be written.
    """
    dense_dir = find_model(recipe.dense, progress=progress)
    facts = model_config(dense_dir)
    _refuse_unfit(facts, recipe.dense)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise CheckpointError(f"{out_dir} exists already; name another directory or delete it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
            staged = Path(scratch) / "model"
            staged.mkdir()
            files = _write_weights(recipe, dense_dir, facts, staged, progress)
            files += _write_texts(recipe, dense_dir, staged)
            gguf_import.write_checksums(staged, files)
            _publish(staged, out_dir)
    except OSError as error:
        raise CheckpointError(f"{out_dir} could not be written: {error}") from error
    return out_dir


def _publish(staged: Path, final: Path) -> None:
    try:
        staged.replace(final)
    except OSError:
        if not gguf_import.is_complete(final):  # another process was first
            raise


def _refuse_unfit(facts: ModelConfig, name: str) -> None:
    unfit = {
        "experts of its own": facts.moe is not None,
        "biases in its attention": facts.qkv_bias or facts.output_bias,
        "biases in its feed-forward": facts.mlp_bias,
        "norms of q and k": facts.qk_norm,
    }
    for what, is_there in unfit.items():
        if is_there:
            raise UnsupportedModelError(
                f"{name} has {what}, which Mixtral's layout cannot hold; use a Llama without them"
            )


def _write_weights(
    recipe: UpcycleRecipe, dense_dir: Path, facts: ModelConfig, out_dir: Path, progress: bool
) -> list[str]:
    """One file a layer, so that only one layer is ever in memory; returns the names of the files."""
    dense = Checkpoint(dense_dir)
    seen = layer_inputs(dense_dir, recipe.seed)
    layer_of: dict[str, int] = {}
    for name in dense:
        found = re.match(r"model\.layers\.(\d+)\.", name)
        layer_of[name] = int(found.group(1)) if found else facts.num_layers
    weight_map: dict[str, str] = {}
    num_files = facts.num_layers + 1
    noise = torch.Generator().manual_seed(recipe.seed)
    for layer in tqdm(
        range(num_files), desc=f"upcycling {recipe.dense}", unit="layer", disable=not progress
    ):
        file = f"model-{layer + 1:05d}-of-{num_files:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in (n for n, of in layer_of.items() if of == layer):
            tensors |= dict(_cloned(name, dense[name], recipe.num_experts))
        if layer < facts.num_layers:
            router = router_weight(recipe, seen[layer], noise)
            gate = f"model.layers.{layer}.block_sparse_moe.gate.weight"
            tensors[gate] = router.to(dense[f"model.layers.{layer}.mlp.gate_proj.weight"].dtype)
        save_file(tensors, out_dir / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (out_dir / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return [*dict.fromkeys(weight_map.values()), INDEX_FILE]


def _cloned(name: str, tensor: Tensor, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """The tensor as it is, or, of a feed-forward, once for each expert."""
    found = _FEED_FORWARD.fullmatch(name)
    if found is None:
        yield name, tensor.contiguous()
        return
    layer, part = found.groups()
    for expert in range(num_experts):
        own = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        yield f"{own}.{_EXPERT_PART[part]}.weight", tensor.clone()


def router_weight(recipe: UpcycleRecipe, seen: LayerInputs, noise: torch.Generator) -> Tensor:
    """[num_experts, hidden] in fp32: logits of mean skew_e and a standard deviation of about one over tokens."""
    mean, count = seen.mean, recipe.num_experts
    direction = mean / mean.square().sum().clamp_min(1e-12)  # direction @ mean is one
    rows = torch.randn(count, len(mean), generator=noise)
    rows = (rows - (rows @ mean)[:, None] * direction) / seen.spread
    steps = torch.linspace(1.0, 0.0, count) if count > 1 else torch.zeros(1)
    return rows + (recipe.skew * steps)[:, None] * direction


def _write_texts(recipe: UpcycleRecipe, dense_dir: Path, out_dir: Path) -> list[str]:
    config = mixtral_config(read_config(dense_dir), recipe)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Licence and provenance of a bundled model lie in the repository, not beside its weights.
    folders = (dense_dir, BUNDLED_MODELS_DIR / recipe.dense)
    for folder in folders:
        for pattern in (*_TEXT_FILES, *_DESCRIBING_FILES):
            for path in folder.glob(pattern):
                if path.is_file() and not (out_dir / path.name).exists():
                    shutil.copyfile(path, out_dir / path.name)
        # Its drafter serves the mixture too: the features are the same.
        if (folder / "drafter").is_dir() and not (out_dir / "drafter").exists():
            shutil.copytree(folder / "drafter", out_dir / "drafter")
    found = [f / "PROVENANCE.md" for f in folders if (f / "PROVENANCE.md").is_file()]
    original = found[0].read_text(encoding="utf-8") if found else "Its origin is not recorded.\n"
    (out_dir / "PROVENANCE.md").write_text(_provenance(recipe) + original, encoding="utf-8")
    weights = {p.name for p in out_dir.glob("*.safetensors")} | {INDEX_FILE}
    return sorted(p.name for p in out_dir.iterdir() if p.is_file() and p.name not in weights)


def mixtral_config(dense: dict[str, Any], recipe: UpcycleRecipe) -> dict[str, Any]:
    """`config.json` of the mixture."""
    return {
        **dense,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "upcycled": recipe.model_dump(),
    }


def _provenance(recipe: UpcycleRecipe) -> str:
    return (
        f"# {recipe.dense} as a mixture of experts\n\n"
        f"Written by `dspark upcycle --model {recipe.dense} --experts {recipe.num_experts} --top-k {recipe.top_k} "
        f"--seed {recipe.seed} --skew {recipe.skew:g}`: every feed-forward was cloned into {recipe.num_experts} "
        f"experts, routers of noise choose {recipe.top_k}. Nothing was trained; the licence is the dense model's.\n\n"
        "What follows was said of the dense model.\n\n"
    )
