"""What cannot be computed faithfully is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine.checkpoint import UnsupportedModelError, find_model, model_config
from actors.engine.weights import CheckpointError
from tests.torch_cpu.oracle_models import engine_of


@pytest.fixture
def model_dir(oracle_models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(oracle_models / "llama", tmp_path / "llama"))


def edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "dynamic"}}, "dynamic"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_an_unsupported_model_is_refused(
    model_dir: Path, changes: dict[str, Any], named: str
) -> None:
    edit_config(model_dir, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        engine_of(model_dir)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"num_hidden_layers": 2}, "unexpected 'model.layers.2"),
        ({"num_hidden_layers": 4}, "missing 'model.layers.3"),
        ({"intermediate_size": 97}, r"gate_proj.weight' has shape \[96, 64\].*\[97, 64\]"),
        ({"attention_bias": True}, "missing 'model.layers.0.self_attn.k_proj.bias'"),
        ({"tie_word_embeddings": False}, "missing 'lm_head.weight'"),
        ({"max_position_embeddings": 64}, "max_model_len=128"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    model_dir: Path, changes: dict[str, Any], named: str
) -> None:
    edit_config(model_dir, **changes)
    with pytest.raises(CheckpointError, match=named):
        engine_of(model_dir)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {}, (12, 12, 12)),
        ("mistral", {"sliding_window": None}, (0, 0, 0)),
        ("mixtral", {"sliding_window": 30}, (30, 30, 30)),
        ("llama", {}, (0, 0, 0)),
        ("llama", {"sliding_window": 64, "use_sliding_window": False}, (0, 0, 0)),
        ("qwen2_windowed", {}, (0, 9, 9)),
        ("qwen2_windowed", {"layer_types": None}, (0, 9, 9)),
        ("qwen2_windowed", {"layer_types": None, "max_window_layers": 0}, (9, 9, 9)),
        ("qwen2_windowed", {"layer_types": None, "max_window_layers": None}, (0, 0, 0)),
        ("qwen2_windowed", {"use_sliding_window": False}, (0, 0, 0)),
        ("qwen3_layer_types", {}, (17, 0, 17)),
        ("qwen3_moe_windowed", {}, (5, 5, 5)),
        ("qwen3_moe", {"sliding_window": 7}, (0, 0, 0)),
    ],
)
def test_windows_are_read_as_transformers_reads_them(
    oracle_models: Path, tmp_path: Path, name: str, changes: dict[str, Any], windows: tuple[int]
) -> None:
    model = Path(shutil.copytree(oracle_models / name, tmp_path / name))
    edit_config(model, **changes)
    assert model_config(model).windows == windows


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3_layer_types", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (
            "qwen3_layer_types",
            {"layer_types": ["full_attention"]},
            "layer_types lists 1 layers of 3",
        ),
        ("qwen3_layer_types", {"sliding_window": 0}, "sliding_window=0"),
        ("qwen2_windowed", {"layer_types": None, "max_window_layers": -1}, "max_window_layers=-1"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layers of Mistral.* are alike"),
    ],
)
def test_a_window_that_is_unclear_is_refused(
    oracle_models: Path, tmp_path: Path, name: str, changes: dict[str, Any], named: str
) -> None:
    model = Path(shutil.copytree(oracle_models / name, tmp_path / name))
    edit_config(model, **changes)
    with pytest.raises(CheckpointError, match=named):
        model_config(model)


def edit_tensors(model_dir: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    edit(tensors)
    save_file(tensors, model_dir / "model.safetensors")


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing 'model.layers.1.mlp.up_proj.weight'"):
        engine_of(model_dir)


def test_an_unexpected_tensor_is_named(model_dir: Path) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    edit_tensors(model_dir, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"unexpected 'model.layers.0.self_attn.q_norm"):
        engine_of(model_dir)


def test_a_head_beside_tied_embeddings_is_not_used(model_dir: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(160, 64), "model.rotary_emb.inv_freq": torch.ones(8)}
    edit_tensors(model_dir, lambda tensors: tensors.update(extra))
    assert engine_of(model_dir).check_row_invariance()


def test_a_tap_beyond_the_model_is_refused(model_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"taps layers \[3\].*has 3"):
        engine_of(model_dir, taps=(1, 3))


def test_older_spellings_mean_the_same(oracle_models: Path, tmp_path: Path) -> None:
    source = oracle_models / "llama_biased"
    want = model_config(source)
    raw = json.loads((source / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(source / "generation_config.json", tmp_path)
    assert want.rope.kind == "llama3"
    assert model_config(tmp_path) == want


def test_end_tokens_come_from_the_generation_config(model_dir: Path) -> None:
    assert model_config(model_dir).eos_token_ids == (2,)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert model_config(model_dir).eos_token_ids == (2, 9)


def test_an_unknown_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no-such-model"):
        find_model("no-such-model")
    with pytest.raises(CheckpointError, match=r"no directory"):
        find_model(str(tmp_path / "absent"))


def test_the_identity_follows_weights_dtype_and_threads(model_dir: Path) -> None:
    torch.set_num_threads(1)
    first = engine_of(model_dir).spec.identity
    assert engine_of(model_dir).spec.identity == first
    changed = {engine_of(model_dir, dtype="bfloat16").spec.identity}
    changed.add(engine_of(model_dir, numerics="fast").spec.identity)
    torch.set_num_threads(2)
    changed.add(engine_of(model_dir).spec.identity)
    torch.set_num_threads(1)
    edit_tensors(model_dir, lambda tensors: tensors["model.norm.weight"].mul_(2))
    changed.add(engine_of(model_dir).spec.identity)
    assert len(changed | {first}) == 5
