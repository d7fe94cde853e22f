"""A new drafter's first weights: what is copied, and q/k norms that leave the copied scale alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from actors.engine.drafters.checkpoint import build
from actors.engine.drafters.config import DSparkConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.eagle3 import Eagle3Model
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.mtp import MtpModel
from actors.engine.training.initialise import (
    Shape,
    choose_draft_ids,
    config_for_target,
    grow,
    initialise_from_target,
)
from actors.engine.weights import CheckpointError, embedding_tables
from tests.torch_cpu.rank_engines import HIDDEN, LAYERS, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import random_model, tiny_config

TAPS = (0, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_tiny_llama(path)
    return path


def new(
    target: Path, seed: int = 1, features: torch.Tensor | None = None, **shape: object
) -> DraftModel:
    config = config_for_target(target, Shape(taps=TAPS, gamma=3, markov_rank=4, **shape))  # type: ignore[arg-type]
    model = build(config, *embedding_tables(target, torch.float32), torch.arange(VOCAB))
    initialise_from_target(model, target, seed, features)
    return model


def test_the_shape_of_each_kind(target: Path) -> None:
    dspark = config_for_target(target, Shape(taps=TAPS))
    assert isinstance(dspark, DSparkConfig)
    assert (dspark.kind, dspark.block_size, dspark.num_hidden_layers) == ("dspark", 7, 2)
    assert dspark.qk_norm
    assert dspark.enable_confidence_head
    assert not dspark.reduced
    dflash = config_for_target(target, Shape(kind="dflash", taps=TAPS, num_layers=1))
    assert isinstance(dflash, DSparkConfig)
    assert (dflash.kind, dflash.markov_rank, dflash.enable_confidence_head) == ("dflash", 0, False)
    assert config_for_target(target, Shape(kind="eagle3", taps=TAPS)).kind == "eagle3"
    mtp = config_for_target(target, Shape(kind="mtp", taps=TAPS))
    assert (mtp.block_size, mtp.target_layer_ids) == (1, (LAYERS - 1,))
    assert not config_for_target(target, Shape(taps=TAPS, qk_norm=False)).qk_norm
    with pytest.raises(CheckpointError, match="--layers 9"):
        config_for_target(target, Shape(taps=TAPS, num_layers=9))


def test_layers_are_the_targets_last_ones(target: Path) -> None:
    weights = load_file(target / "model.safetensors")
    model = new(target, num_layers=2)
    for index in range(2):
        prefix = f"model.layers.{LAYERS - 2 + index}."
        for name, parameter in model.get_submodule(f"layers.{index}").named_parameters():
            if not name.startswith(("self_attn.q_norm", "self_attn.k_norm")):
                torch.testing.assert_close(parameter.detach(), weights[prefix + name], msg=name)


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3", "mtp"])
@pytest.mark.parametrize("real", [False, True])
def test_norms_keep_the_mean_scale_of_the_copied_projections(
    target: Path, kind: str, real: bool
) -> None:
    features = torch.randn(200, 2 * HIDDEN) * torch.rand(2 * HIDDEN) * 3
    if kind == "mtp":
        features = features[:, :HIDDEN]
    model = new(target, kind=kind, features=features if real else None)
    layer = model.get_submodule("layers.0")
    attention = layer.get_submodule("self_attn")
    norm = layer.get_submodule("hidden_norm" if kind == "eagle3" else "input_layernorm")
    probes = features[:, -HIDDEN:] if real else torch.randn(4000, HIDDEN)
    x = F.rms_norm(probes, (HIDDEN,), norm.get_parameter("weight"), 1e-5)
    for part in "qk":
        copied = attention.get_submodule(f"{part}_proj").get_parameter("weight")[:, -HIDDEN:]
        plain = (x @ copied.T).unflatten(-1, (-1, HIDDEN // 4))
        kept = attention.get_submodule(f"{part}_norm")(plain)
        before, after = (t.square().mean(-1).sqrt().mean() for t in (plain, kept))
        torch.testing.assert_close(after, before, rtol=1e-3 if real else 0.03, atol=0)


def test_what_has_no_counterpart_starts_without_effect(target: Path) -> None:
    for head in ("vanilla", "gated", "rnn"):
        model = new(target, markov_head=head)
        assert isinstance(model, DSparkModel)
        hidden, previous = torch.randn(2, 3, HIDDEN), torch.randint(0, VOCAB, (2, 3))
        torch.testing.assert_close(model.logits(hidden, previous), model.base_logits(hidden))
        assert model.fc.weight[:, -HIDDEN:].equal(torch.eye(HIDDEN))
    eagle, mtp = new(target, kind="eagle3"), new(target, kind="mtp")
    assert isinstance(eagle, Eagle3Model)
    assert isinstance(mtp, MtpModel)
    assert mtp.eh_proj.weight[:, :HIDDEN].equal(torch.eye(HIDDEN))
    assert eagle.layer.self_attn.q_proj.weight[:, :HIDDEN].std() < 0.05


@pytest.mark.parametrize(
    "shape", [{"markov_head": "rnn"}, {"markov_head": "gated"}, {"kind": "eagle3"}, {"kind": "mtp"}]
)
def test_the_seed_decides_everything_random(target: Path, shape: dict[str, str]) -> None:
    torch.manual_seed(11)
    one = new(target, **shape)
    torch.manual_seed(12)
    again, other = new(target, **shape), new(target, seed=2, **shape)
    for key, parameter in one.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[key]), key
    assert any(
        not torch.equal(p, dict(other.named_parameters())[k]) for k, p in one.named_parameters()
    )


def test_the_draft_vocabulary_is_what_occurs_most() -> None:
    counts = torch.zeros(20)
    counts[[3, 17, 5]] = torch.tensor([2.0, 9.0, 1.0])
    assert choose_draft_ids(counts, 5).tolist() == [0, 1, 3, 5, 17]


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
def test_a_drafter_grows_to_longer_blocks_with_its_own_weights(target: Path, kind: str) -> None:
    start = new(target, kind=kind, qk_norm=False)
    grown = grow(start, 6, qk_norm=False)
    assert (start.config.block_size, grown.config.block_size) == (3, 6)
    assert torch.equal(grown.head, start.head)
    for name, parameter in grown.named_parameters():
        assert torch.equal(parameter, dict(start.named_parameters())[name]), name
    with_norms = grow(start, 6, qk_norm=True)
    attention = with_norms.get_submodule("layers.0.self_attn")
    assert attention.get_submodule("q_norm").get_parameter("weight").std() == 0
    assert with_norms.config.qk_norm
    with pytest.raises(CheckpointError, match="tied_to_target"):
        grow(random_model(tiny_config(tied_to_target=False)), 6, qk_norm=True)


def test_a_drafter_of_part_of_the_vocabulary_keeps_it(target: Path) -> None:
    config = config_for_target(target, Shape(taps=TAPS, gamma=3, draft_vocab_size=20))
    ids = torch.randperm(VOCAB)[:20].sort().values
    start = build(config, *embedding_tables(target, torch.float32), ids)
    grown = grow(start, 4, qk_norm=True)
    assert torch.equal(grown.draft_ids, ids)
    assert torch.equal(grown.head, start.head)
