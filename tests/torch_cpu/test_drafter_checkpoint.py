"""Loading drafters: what fits loads to the same numbers, what does not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.engine.drafters.checkpoint import load_drafter, save_drafter
from actors.engine.drafters.config import DSparkConfig, parse_config
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.weights import CheckpointError

DEEPSPEC: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_target_layers": 9,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 96,
    "block_size": 5,
    "mask_token_id": 3,
    "target_layer_ids": [0, 2, 4],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}


def deepspec_tensors() -> dict[str, Tensor]:
    """Names and shapes of spec 1.12, filled with noise."""
    shapes = {
        "embed_tokens.weight": (96, 32),
        "lm_head.weight": (96, 32),
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "markov_head.markov_w1.weight": (96, 6),
        "markov_head.markov_w2.weight": (96, 6),
        "confidence_head.proj.weight": (1, 38),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(2):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (32,),
                "post_attention_layernorm": (32,),
                "self_attn.q_proj": (32, 32),
                "self_attn.k_proj": (16, 32),
                "self_attn.v_proj": (16, 32),
                "self_attn.o_proj": (32, 32),
                "self_attn.q_norm": (8,),
                "self_attn.k_norm": (8,),
                "mlp.gate_proj": (48, 32),
                "mlp.up_proj": (48, 32),
                "mlp.down_proj": (32, 48),
            }.items()
        }
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def load(path: Path) -> DSparkModel:
    table = torch.zeros(96, 32)
    return load_drafter(path, table, table)


def test_a_deepspec_checkpoint_loads_with_its_own_tables(tmp_path: Path) -> None:
    tensors = deepspec_tensors()
    model = load(write(tmp_path / "d", DEEPSPEC, tensors))
    assert model.config.qk_norm
    torch.testing.assert_close(model.embed, tensors["embed_tokens.weight"])
    torch.testing.assert_close(model.head, tensors["lm_head.weight"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), tensors[name])


@pytest.mark.parametrize("name", sorted(deepspec_tensors()))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = deepspec_tensors()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"missing '{name}'"):
        load(write(tmp_path / "d", DEEPSPEC, tensors))


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    tensors = deepspec_tensors() | {"layers.2.mlp.up_proj.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unexpected 'layers\.2\.mlp\.up_proj\.weight'"):
        load(write(tmp_path / "d", DEEPSPEC, tensors))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = deepspec_tensors() | {"fc.weight": torch.zeros(32, 160)}
    with pytest.raises(CheckpointError, match=r"'fc\.weight'.*\[32, 160\].*\[32, 96\]"):
        load(write(tmp_path / "d", DEEPSPEC, tensors))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("target_layer_ids", [4, 2]),
        ("markov_head_type", "lstm"),
        ("mask_token_id", 96),
        ("block_size", "7"),
        ("num_key_value_heads", 3),
        ("rope_scaling", {"type": "yarn"}),
        ("draft_vocab_size", 97),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
    ],
)
def test_a_bad_config_field_is_named(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        parse_config({**DEEPSPEC, field: value})


def reduced_model() -> DSparkModel:
    config = DSparkConfig.parse({**DEEPSPEC, "draft_vocab_size": 40, "tied_to_target": True})
    torch.manual_seed(1)
    ids = torch.randperm(96)[:40].sort().values
    model = DSparkModel(config, torch.randn(96, 32), torch.randn(96, 32), ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).bfloat16())
    return model


def test_a_reduced_tied_drafter_survives_saving(tmp_path: Path) -> None:
    model = reduced_model()
    save_drafter(model, tmp_path, {"num_target_layers": 9})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    head = torch.randn(96, 32)
    loaded = load_drafter(tmp_path, model.embed, head)
    assert loaded.config == model.config
    torch.testing.assert_close(loaded.draft_ids, model.draft_ids)
    torch.testing.assert_close(loaded.head, head[model.draft_ids])
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_a_map_that_repeats_a_token_is_refused(tmp_path: Path) -> None:
    model = reduced_model()
    model.draft_ids[1] = model.draft_ids[0]
    save_drafter(model, tmp_path)
    with pytest.raises(CheckpointError, match="'d2t'"):
        load(tmp_path)


def test_a_drafter_for_another_target_is_refused(tmp_path: Path) -> None:
    save_drafter(reduced_model(), tmp_path)
    table = torch.zeros(96, 64)
    with pytest.raises(CheckpointError, match="embedding is"):
        load_drafter(tmp_path, table, table)


def in_eight_bits(path: Path) -> tuple[DSparkModel, dict[str, Tensor]]:
    model = reduced_model()
    save_drafter(model, path, in_eight_bits=True)
    return model, load_file(path / "model.safetensors")


def test_a_drafter_in_eight_bits_loads_to_within_half_a_step_of_each_row(tmp_path: Path) -> None:
    model, stored = in_eight_bits(tmp_path)
    loaded = load_drafter(tmp_path, model.embed, torch.randn(96, 32))
    matrices = 0
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        if stored[name].dtype == torch.int8:
            matrices += 1
            steps = a.detach().abs().amax(1, keepdim=True) / 127
            assert bool(((a - b).abs() <= 0.5001 * steps).all()), name
        else:
            torch.testing.assert_close(a, b, msg=name)
    assert matrices == 3 + 2 * 7  # fc, W1, W2, and seven of each layer
    assert stored["confidence_head.proj.weight"].dtype == torch.bfloat16
    assert bool((loaded.draft_ids == model.draft_ids).all())


def test_a_row_of_zeros_survives_eight_bits(tmp_path: Path) -> None:
    model = reduced_model()
    with torch.no_grad():
        model.fc.weight[3] = 0
    save_drafter(model, tmp_path, in_eight_bits=True)
    assert not load(tmp_path).fc.weight[3].any()


NAN = torch.full((32,), float("nan"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fc.weight.row_scale": None}, r"'fc\.weight' .*without 'fc\.weight\.row_scale'"),
        ({"fc.weight.row_scale": torch.ones(31)}, r"'fc\.weight\.row_scale' .*\[31\]"),
        ({"fc.weight.row_scale": torch.ones(32).half()}, r"'fc\.weight\.row_scale' .*float16"),
        ({"fc.weight.row_scale": NAN}, r"'fc\.weight\.row_scale' .*not finite"),
        ({"fc.weight.row_scale": -torch.ones(32)}, r"'fc\.weight\.row_scale' .*negative"),
        ({"fc.weight": torch.zeros(32, 95, dtype=torch.int8)}, r"'fc\.weight'.*\[32, 95\]"),
        ({"fc.weight": torch.zeros(32, 96, dtype=torch.int16)}, r"'fc\.weight' .*int16"),
        ({"fc.weight": torch.zeros(32, 96)}, r"'fc\.weight\.row_scale' .*float32"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int8)}, r"'norm\.weight' .*int8"),
        ({"gc.weight.row_scale": torch.ones(32)}, r"unexpected 'gc\.weight\.row_scale'"),
        ({"d2t.row_scale": torch.ones(40)}, r"unexpected 'd2t\.row_scale'"),
    ],
)
def test_malformed_eight_bits_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Tensor | None], says: str
) -> None:
    _, stored = in_eight_bits(tmp_path)
    kept = {n: t for n, t in {**stored, **changes}.items() if t is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)
