"""What a target checkpoint is: `config.json` of the decoder family as typed facts, and its tensors by role.

Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral differ in biases, q/k norms, windows and the feed-forward part only;
a `ModelConfig` says which of these a model has, so that nothing after this module asks for an architecture's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine.config_fields import ConfigFields, UnsupportedModelError
from actors.engine.weights import CheckpointError, read_config
from configs.recipe import read_recipe

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
)
BUNDLED_MODELS_DIR = Path(__file__).resolve().parents[2] / "configs" / "models"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how frequencies are stretched beyond the trained length."""

    theta: float
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts of the sparse layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise_top_k: bool
    sparse_layers: tuple[bool, ...]  # [num_layers]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the family, as its `config.json` describes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]
    windows: tuple[
        int, ...
    ]  # [num_layers] keys a token of the layer sees, its own included; 0: all

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and self.moe.sparse_layers[layer]


def model_config(model_dir: Path) -> ModelConfig:
    """Read and check `config.json` of `model_dir`.

    Raises UnsupportedModelError for a model outside the family and CheckpointError for a field that is absent or of
    the wrong type; both name the field.
    """
    raw = read_config(model_dir)
    architecture = str((raw.get("architectures") or ["?"])[0])
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model_dir}: architectures={raw.get('architectures')}: use one of {', '.join(ARCHITECTURES)}"
        )
    fields = ConfigFields(raw, model_dir)
    _refuse_unsupported(raw, fields)
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{model_dir}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    has_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.count("head_dim", hidden // heads),
        norm_eps=fields.number("rms_norm_eps"),
        rope=_rope_config(raw, fields),
        max_position=fields.count("max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or has_bias,
        output_bias=has_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
        moe=_moe_config(raw, fields, architecture),
        eos_token_ids=_eos_token_ids(raw, model_dir),
        windows=_windows(raw, fields, architecture),
    )


def _refuse_unsupported(raw: Mapping[str, Any], fields: ConfigFields) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", raw["hidden_act"], "this family uses silu")
    if raw.get("quantization_config") is not None:
        raise fields.refuse(
            "quantization_config", raw["quantization_config"], "use an fp32 or bf16 checkpoint"
        )


def _rope_config(raw: Mapping[str, Any], fields: ConfigFields) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    scaling = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    given = fields.within({"rope_theta": raw.get("rope_theta", 10000.0), **scaling})
    theta = given.number("rope_theta")
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return RopeConfig(theta)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor", scaling["partial_rotary_factor"], "use 1.0")
    if kind == "linear":
        return RopeConfig(theta, kind, given.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            given.number("factor"),
            given.number("low_freq_factor"),
            given.number("high_freq_factor"),
            given.count("original_max_position_embeddings"),
        )
    raise fields.refuse("rope_type", kind, "use default, linear or llama3")


def _windows(raw: Mapping[str, Any], fields: ConfigFields, architecture: str) -> tuple[int, ...]:
    """As transformers reads them: Mistral and Mixtral have one for all layers, Qwen by `use_sliding_window`."""
    layers, kinds = fields.count("num_hidden_layers"), raw.get("layer_types")
    if architecture == "LlamaForCausalLM":
        window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
        if window is not None:
            raise fields.refuse("sliding_window", window, "Llama has full attention")
        return (0,) * layers
    default = None if architecture == "MixtralForCausalLM" else 4096
    is_windowed = raw.get("sliding_window", default) is not None
    if architecture.startswith("Qwen"):
        is_windowed = is_windowed and bool(raw.get("use_sliding_window", False))
    window = fields.count("sliding_window", default) if is_windowed else 0
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = fields.count("max_window_layers", 28, least=0)
        is_sliding = [i >= first for i in range(layers)]
        if kinds is not None:
            is_sliding = [fields.is_sliding(kind) for kind in kinds]
        if len(is_sliding) != layers:
            raise CheckpointError(
                f"layer_types lists {len(is_sliding)} layers of {layers}; list all"
            )
        return tuple(window if sliding else 0 for sliding in is_sliding)
    if kinds is not None and {fields.is_sliding(kind) for kind in kinds} != {is_windowed}:
        raise fields.refuse("layer_types", kinds, f"all layers of {architecture} are alike")
    return (window,) * layers


def _moe_config(
    raw: Mapping[str, Any], fields: ConfigFields, architecture: str
) -> MoeConfig | None:
    layers = fields.count("num_hidden_layers")
    if architecture == "MixtralForCausalLM":
        return MoeConfig(
            fields.count("num_local_experts"),
            fields.count("num_experts_per_tok"),
            fields.count("intermediate_size"),
            normalise_top_k=True,
            sparse_layers=(True,) * layers,
        )
    if architecture != "Qwen3MoeForCausalLM":
        return None
    name = "num_experts" if "num_experts" in raw else "num_local_experts"
    step = fields.count("decoder_sparse_step", 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return MoeConfig(
        fields.count(name),
        fields.count("num_experts_per_tok"),
        fields.count("moe_intermediate_size"),
        normalise_top_k=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _eos_token_ids(raw: Mapping[str, Any], model_dir: Path) -> tuple[int, ...]:
    """From `generation_config.json` where it says so, else from `config.json`."""
    path = model_dir / "generation_config.json"
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    ids = value.get("eos_token_id", raw.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in (ids if isinstance(ids, list) else [ids]))


def find_model(path: str, *, progress: bool = True) -> Path:
    """The directory of the model called `path`.

    A folder name under `configs/models/`, a directory, or a hub id `owner/name`, which is fetched with
    `huggingface_hub` (nothing else reaches the network, except the first conversion of the bundled model).
    A folder with a recipe stands for a mixture made from a dense model on first use.
    Raises CheckpointError when it is none of these or cannot be fetched.
    """
    bundled = BUNDLED_MODELS_DIR / path
    recipe = read_recipe(path)
    if recipe is not None:
        from actors.engine import upcycle  # needs this module

        return upcycle.ensure_upcycled(path, recipe, progress=progress)
    if "/" not in path and (bundled / "config.json").is_file():
        if any(bundled.glob("*.safetensors")):
            return bundled
        from actors.engine import gguf_import  # needs gguf: only where the bundled model is used

        if path == gguf_import.MODEL_NAME:
            return gguf_import.ensure_smollm2(progress=progress)
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise CheckpointError(
            f"model.path={path!r} is no folder under configs/models, no directory and no hub id (owner/name)"
        )
    return _fetch(path)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # only for a hub id

    try:
        found = snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
    except Exception as error:  # its many errors share no base class
        raise CheckpointError(
            f"model.path={hub_id!r} could not be fetched ({error}); check the name, or give a directory"
        ) from error
    return Path(found)
