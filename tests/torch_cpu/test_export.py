"""`dspark export`: what it writes has exactly the names and shapes of the format, and loads to the same drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.engine.drafters.checkpoint import load_drafter, save_drafter
from actors.engine.drafters.config import DrafterConfig, DSparkConfig
from actors.engine.drafters.export import FORMATS, export
from actors.engine.drafters.model import BlockInputs, DraftModel
from actors.engine.weights import CheckpointError, embedding_tables
from cluster.cli import main
from cluster.commands import export as command
from tests.torch_cpu.format_files import (
    DEEPSPEC,
    RANK,
    REDUCED,
    V,
    deepspec_shapes,
    speculators_config,
    speculators_shapes,
)
from tests.torch_cpu.greedy_blocks import draft_greedy
from tests.torch_cpu.rank_engines import write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model

TAPS = (0, 2, 4, 5, 7)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_tiny_llama(path)
    return path


def drafter(path: Path, target: Path, name: str, **changes: object) -> DraftModel:
    """A drafter directory with bf16 weights for the tiny Llama; returns the model as it is loaded."""
    shape = {"qk_norm": True, "draft_vocab_size": V, "target_layer_ids": TAPS, "block_size": 5}
    config: DrafterConfig = every_config(**{**shape, **changes})[name]
    save_drafter(random_model(config), path)
    (path / "calibration.json").write_text('{"temperatures": [1, 1, 1, 1, 1]}')
    return load_drafter(path, *embedding_tables(target, torch.bfloat16))


def check_same(one: DraftModel, other: DraftModel) -> None:
    assert type(one) is type(other)
    # Where the tables and the norms come from is said in another way in each format.
    assert replace(one.config, tied_to_target=True) == replace(other.config, tied_to_target=True)
    torch.manual_seed(0)
    anchors = torch.tensor([[4, 9]])
    inputs = BlockInputs(
        torch.randn(1, 12, one.config.feature_dim),
        torch.randint(0, V, (1, 12)),
        anchors,
        torch.randint(0, V, (1, 2)),
    )
    previous = torch.randint(0, V, (1, 2, one.config.block_size))
    for model in (one, other):
        model.embed, model.head = model.embed.float(), model.head.float()
    left, right = one.slots(inputs, previous), other.slots(inputs, previous)
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(one.base_logits(left), other.base_logits(right))
    for a, b in zip(one.codes(left, previous), other.codes(right, previous), strict=True):
        torch.testing.assert_close(a, b)
    blocks = draft_greedy(one, inputs), draft_greedy(other, inputs)
    assert torch.equal(blocks[0].token_ids, blocks[1].token_ids)
    assert (blocks[0].confidence_logits is None) == (blocks[1].confidence_logits is None)


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "headless", "dflash", "eagle3"])
def test_deepspec_files_have_its_names_and_shapes(tmp_path: Path, target: Path, name: str) -> None:
    model = drafter(tmp_path / "d", target, name)
    written = export(tmp_path / "d", target, "deepspec", tmp_path / "out")
    assert written["kind"] == model.config.kind
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    shapes = deepspec_shapes({"headless": "vanilla"}.get(name, name))
    if name == "headless":
        shapes = {n: s for n, s in shapes.items() if not n.startswith("confidence_head")}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == shapes
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    like = DEEPSPEC[name if name in DEEPSPEC else "vanilla"]
    assert config["architectures"] == like["architectures"]
    wanted = set(like) - {"target_model_name_or_path", "head_dim", "rope_scaling", "attention_bias"}
    assert wanted <= set(config)
    assert not {"qk_norm", "tied_to_target", "draft_vocab_size"} & set(config)
    check_same(model, load_drafter(tmp_path / "out", *embedding_tables(target, torch.bfloat16)))
    assert (tmp_path / "out" / "calibration.json").is_file()


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash"])
def test_speculators_files_have_its_names_and_shapes(
    tmp_path: Path, target: Path, name: str, reduced: bool
) -> None:
    model = drafter(tmp_path / "d", target, name, draft_vocab_size=REDUCED if reduced else V)
    export(tmp_path / "d", target, "speculators", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    if name == "vanilla":
        shapes = {n: tuple(t.shape) for n, t in tensors.items()}
        assert shapes == speculators_shapes(reduced)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        wanted = speculators_config(reduced)
        assert set(config) == set(wanted)
        for field in set(wanted) - {"transformer_layer_config", "speculators_config"}:
            assert config[field] == wanted[field], field
        assert config["markov_rank"] == RANK
    check_same(model, load_drafter(tmp_path / "out", *embedding_tables(target, torch.bfloat16)))


def test_what_a_format_cannot_express_is_refused_with_a_remedy(
    tmp_path: Path, target: Path
) -> None:
    cases = [
        ("vanilla", {"qk_norm": False}, "deepspec", "--qk-norm"),
        ("vanilla", {"qk_norm": False}, "speculators", "--qk-norm"),
        ("vanilla", {"draft_vocab_size": REDUCED}, "deepspec", "--format speculators"),
        ("eagle3", {"target_layer_ids": (0, 2)}, "deepspec", "5 layers"),
        ("eagle3", {}, "speculators", "--format deepspec"),
        ("mtp", {}, "deepspec", "DSpark"),
        ("mtp", {}, "speculators", "mtp"),
    ]
    for i, (name, changes, format_, remedy) in enumerate(cases):
        drafter(tmp_path / str(i), target, name, **changes)
        with pytest.raises(CheckpointError, match=remedy):
            export(tmp_path / str(i), target, format_, tmp_path / "out")  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="another directory"):
        export(tmp_path / "2", target, "speculators", tmp_path / "2")


def test_the_command(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.FORMATS == FORMATS
    model = drafter(tmp_path / "d", target, "vanilla")
    assert isinstance(model.config, DSparkConfig)
    own = ["--set", f"model.path={target}", "--out", str(tmp_path / "out")]
    arguments = ["export", "--format", "deepspec", "--drafter", str(tmp_path / "d"), *own]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "dspark"
    assert main(arguments) == 0
    assert "MB" in capsys.readouterr().out
    assert main(["export", "--format", "deepspec", *own, "--set", "model.drafter=ngram"]) == 2
    assert "--drafter DIR" in capsys.readouterr().err
    assert main(["export", "--format", "deepspec", "--drafter", str(tmp_path), *own]) == 1
    assert "no drafter in" in capsys.readouterr().err
