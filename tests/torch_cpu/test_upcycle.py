"""A dense model upcycled into experts computes what it did, and its routers do what they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine import gguf_import, upcycle
from actors.engine.checkpoint import find_model, model_config
from actors.engine.config_fields import UnsupportedModelError
from actors.engine.router_probe import compare, fp32_engine
from actors.engine.trial import TrialSequences
from actors.engine.weights import CheckpointError
from configs.recipe import UpcycleRecipe
from tests.torch_cpu.rank_engines import VOCAB, write_tiny_llama


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("dense")
    write_tiny_llama(folder)
    # Trained models have a direction that all tokens share; a random one has not.
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 2.0
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("Apache-2.0")
    (folder / "PROVENANCE.md").write_text("# Tiny\n\nDrawn at random.\n")
    return folder


def made(dense: Path, tmp_path: Path, **options: object) -> Path:
    recipe = UpcycleRecipe.model_validate({"dense": str(dense), **options})
    return upcycle.upcycle(recipe, tmp_path / "made", progress=False)


def load_of_experts(model_dir: Path) -> torch.Tensor:
    """Share of copies each expert of each layer gets over random tokens, [layers, experts]."""
    engine = fp32_engine(model_dir)
    ids = torch.randint(0, VOCAB, (4, 40), generator=torch.Generator().manual_seed(9)).numpy()
    shares = []
    for layer in engine.model.layers:
        route = layer.mlp.route

        def seen(x: torch.Tensor, route=route, moe=layer.mlp):  # type: ignore[no-untyped-def]
            weights, chosen = route(x)
            shares.append(torch.bincount(chosen.flatten(), minlength=moe.num_experts))
            return weights, chosen

        layer.mlp.route = seen
    TrialSequences(engine, list(ids)).logits(dict.fromkeys(range(4), 40))
    counts = torch.stack(shares).float()
    return counts / counts.sum(1, keepdim=True)


@pytest.mark.parametrize("options", [{}, {"num_experts": 3, "top_k": 1}, {"skew": 3.0, "top_k": 3}])
def test_experts_of_an_upcycled_model_write_what_the_dense_one_writes(
    dense: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    found = compare(dense, made(dense, tmp_path, **options), num_tokens=40)
    assert found.num_equal == 40 and found.max_logit_difference < 1e-4


def test_an_expert_that_is_not_a_clone_is_noticed(dense: Path, tmp_path: Path) -> None:
    folder = made(dense, tmp_path)
    file = folder / "model-00002-of-00004.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"] *= -8
    save_file(tensors, file)
    found = compare(dense, folder, num_tokens=40)
    assert found.num_equal < 40 and found.max_logit_difference > 0.1


def test_the_layout_is_mixtrals_and_says_where_it_comes_from(dense: Path, tmp_path: Path) -> None:
    folder = made(dense, tmp_path, seed=5)
    facts = model_config(folder)
    assert facts.architecture == "MixtralForCausalLM" and facts.moe is not None
    assert (facts.moe.num_experts, facts.moe.top_k, facts.moe.normalise_top_k) == (4, 2, True)
    text = (folder / "PROVENANCE.md").read_text()
    assert "--seed 5" in text and "Drawn at random." in text
    assert (folder / "LICENSE").read_text() == "Apache-2.0"
    assert (folder / "tokenizer.json").is_file()
    gguf_import.verify(folder)


def test_experts_share_the_load_evenly_or_skewed_as_asked(dense: Path, tmp_path: Path) -> None:
    even = load_of_experts(made(dense, tmp_path / "even"))
    skewed = load_of_experts(made(dense, tmp_path / "skewed", skew=4.0))
    assert even.mean(0).max() < 0.35 and even.mean(0).min() > 0.15
    mean = skewed.mean(0).tolist()
    assert mean == sorted(mean, reverse=True) and mean[0] > 0.4 and mean[-1] < 0.1


def test_the_same_seed_gives_the_same_experts_router(dense: Path, tmp_path: Path) -> None:
    files = [
        (made(dense, tmp_path / str(i), seed=seed) / "SHA256SUMS").read_text()
        for i, seed in enumerate((1, 1, 2))
    ]
    assert files[0] == files[1] != files[2]


def test_what_the_layout_cannot_hold_is_refused(dense: Path, tmp_path: Path) -> None:
    biased = tmp_path / "biased"
    biased.mkdir()
    config = json.loads((dense / "config.json").read_text())
    (biased / "config.json").write_text(json.dumps({**config, "mlp_bias": True}))
    with pytest.raises(UnsupportedModelError, match="biases in its feed-forward"):
        made(biased, tmp_path)
    with pytest.raises(UnsupportedModelError, match="experts of its own"):
        made(made(dense, tmp_path), tmp_path / "again")
    with pytest.raises(CheckpointError, match="exists already"):
        made(dense, tmp_path)


def test_a_bundled_recipe_is_followed_once_and_again_when_it_changes(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    original = upcycle.upcycle
    monkeypatch.setattr(upcycle, "upcycle", lambda *a, **k: runs.append(a) or original(*a, **k))
    for seed in (1, 1, 2):
        recipe = UpcycleRecipe(dense=str(dense), seed=seed)
        folder = upcycle.ensure_upcycled("tiny-moe", recipe, tmp_path, progress=False)
    assert folder == tmp_path / "tiny-moe" and len(runs) == 2


def test_the_moe_preset_finds_its_experts_through_the_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(
        upcycle,
        "ensure_upcycled",
        lambda name, recipe, **_: asked.append((name, recipe)) or tmp_path,
    )
    assert find_model("smollm2-135m-moe") == tmp_path
    assert asked[0][0] == "smollm2-135m-moe" and asked[0][1].dense == "smollm2-135m"
