"""DeepSpec's and speculators' drafters: what fits loads to the same numbers, what does not is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.drafters.checkpoint import load_drafter, read_drafter_config, save_drafter
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.model import DraftModel
from actors.engine.weights import CheckpointError
from tests.torch_cpu.format_files import (
    DEEPSPEC,
    REDUCED,
    D,
    V,
    deepspec_shapes,
    noise,
    speculators_config,
    speculators_shapes,
    write,
)
from tests.torch_cpu.tiny_drafters import every_config, random_model

TARGET_EMBED, TARGET_HEAD = torch.randn(V, D), torch.randn(V, D)
KINDS = list(DEEPSPEC)


def load(path: Path) -> DraftModel:
    return load_drafter(path, TARGET_EMBED, TARGET_HEAD)


def check_parameters(model: DraftModel, tensors: dict[str, Tensor]) -> None:
    names = dict(model.named_parameters())
    assert set(names) == set(tensors) - {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    for name, parameter in names.items():
        torch.testing.assert_close(parameter.detach(), tensors[name].float(), msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deepspec_file_loads_with_its_own_tables(tmp_path: Path, kind: str) -> None:
    tensors = noise(deepspec_shapes(kind))
    model = load(write(tmp_path / "d", DEEPSPEC[kind], tensors))
    check_parameters(model, tensors)
    torch.testing.assert_close(model.embed, tensors["embed_tokens.weight"].float())
    torch.testing.assert_close(model.head, tensors["lm_head.weight"].float())
    assert model.config.kind == (kind if kind in ("dflash", "eagle3") else "dspark")
    assert model.config.target_layer_ids == (0, 2, 4, 5, 7)
    assert model.config.qk_norm
    assert model.config.block_size == (7 if kind == "eagle3" else 5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_tensor_is_named(tmp_path: Path, kind: str) -> None:
    tensors = noise(deepspec_shapes(kind))
    for name in tensors:
        rest = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=f"missing '{name}'"):
            load(write(tmp_path / "d", DEEPSPEC[kind], rest))


@pytest.mark.parametrize("kind", KINDS)
def test_every_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path, kind: str) -> None:
    shapes = deepspec_shapes(kind)
    for name, shape in shapes.items():
        wrong = (*shape[:-1], shape[-1] + 1)
        tensors = noise({**shapes, name: wrong})
        with pytest.raises(CheckpointError) as caught:
            load(write(tmp_path / "d", DEEPSPEC[kind], tensors))
        assert repr(name) in str(caught.value)
        assert str(list(wrong)) in str(caught.value)
        assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("vanilla", "markov_head.gate_proj.weight"),
        ("dflash", "confidence_head.proj.weight"),
        ("dflash", "markov_head.markov_w1.weight"),
        ("eagle3", "layers.1.mlp.up_proj.weight"),
        ("eagle3", "hidden_norm.weight"),
    ],
)
def test_an_extra_tensor_is_named(tmp_path: Path, kind: str, name: str) -> None:
    tensors = noise(deepspec_shapes(kind)) | {name: torch.zeros(1)}
    with pytest.raises(CheckpointError, match=f"unexpected '{name}'"):
        load(write(tmp_path / "d", DEEPSPEC[kind], tensors))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("eagle3", "draft_num_hidden_layers", 2),
        ("eagle3", "ttt_length", None),
        ("vanilla", "markov_head_type", "lstm"),
        ("vanilla", "architectures", ["Qwen3ForCausalLM"]),
        ("dflash", "confidence_head_with_markov", True),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, kind: str, field: str, value: object) -> None:
    config = {**DEEPSPEC[kind], field: value}
    if field == "confidence_head_with_markov":
        config["enable_confidence_head"] = True
    name = {"draft_num_hidden_layers": "num_hidden_layers"}.get(field, field)
    with pytest.raises(CheckpointError, match=name):
        read_drafter_config(write(tmp_path / "d", config, {}))


@pytest.mark.parametrize("reduced", [False, True])
def test_a_speculators_file_loads_onto_the_targets_tables(tmp_path: Path, reduced: bool) -> None:
    tensors = noise(speculators_shapes(reduced))
    model = load(write(tmp_path / "s", speculators_config(reduced), tensors))
    assert isinstance(model, DSparkModel)
    check_parameters(model, tensors)
    assert model.config.target_layer_ids == (0, 2, 4, 5, 7)
    assert model.embed is TARGET_EMBED
    if reduced:
        assert model.draft_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
        torch.testing.assert_close(model.head, tensors["lm_head.weight"].float())
    else:
        torch.testing.assert_close(model.head, TARGET_HEAD)


def test_tables_of_the_target_may_lie_in_a_speculators_file(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": (V, D), "verifier_norm.weight": (D,)}
    tensors = noise(speculators_shapes(True) | tables | {"verifier_lm_head.weight": (REDUCED, D)})
    load(write(tmp_path / "s", speculators_config(True), tensors))


@pytest.mark.parametrize("reduced", [False, True])
def test_every_missing_or_misshapen_tensor_of_a_speculators_file_is_named(
    tmp_path: Path, reduced: bool
) -> None:
    shapes = speculators_shapes(reduced)
    for name, shape in shapes.items():
        if name == "t2d":
            continue  # d2t says the same
        rest = {n: t for n, t in noise(shapes).items() if n != name}
        with pytest.raises(CheckpointError, match=name):
            load(write(tmp_path / "s", speculators_config(reduced), rest))
        rest[name] = torch.zeros((*shape[:-1], shape[-1] + 1))
        with pytest.raises(CheckpointError, match=name):
            load(write(tmp_path / "s", speculators_config(reduced), rest))
    extra = noise(shapes) | {"layers.2.mlp.up_proj.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unexpected 'layers\.2"):
        load(write(tmp_path / "s", speculators_config(reduced), extra))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_from_anchor", False),
        ("sample_from_anchor", None),
        ("speculators_model_type", "eagle3"),
        ("transformer_layer_config", None),
        ("aux_hidden_state_layer_ids", None),
        ("aux_hidden_state_layer_ids", [0, 3]),
        ("target_hidden_size", 64),
        ("mask_token_id", None),
    ],
)
def test_a_speculators_drafter_we_cannot_run_is_refused(
    tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=field):
        read_drafter_config(write(tmp_path / "s", speculators_config(True, **{field: value}), {}))


def test_an_absent_sample_from_anchor_counts_as_false(tmp_path: Path) -> None:
    config = speculators_config(True)
    del config["sample_from_anchor"]
    with pytest.raises(CheckpointError, match="absent counts as false"):
        read_drafter_config(write(tmp_path / "s", config, {}))


@pytest.mark.parametrize("name", list(every_config()))
@pytest.mark.parametrize("qk_norm", [False, True])
def test_our_own_directories_survive_saving(tmp_path: Path, name: str, qk_norm: bool) -> None:
    model = random_model(every_config(qk_norm=qk_norm)[name])
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    save_drafter(model, tmp_path, {"num_target_layers": 9})
    loaded = load(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    assert torch.equal(loaded.draft_ids, model.draft_ids)
    torch.testing.assert_close(loaded.head, TARGET_HEAD[model.draft_ids])
    for (key, one), (_, other) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=key)
