"""Drafters that are the target: everything they propose is accepted, under every rule.

The target's attention writes nothing (o_proj = 0), so its next token depends on the last one through embedding, MLP,
norm and head alone; then two drafters can hold an exact copy of it. A DSpark drafter holds it as a Markov head: W1 the
state before the output head, W2 the head. MTP holds the layer itself, fed with the token and not with the feature.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from actors.core.local_policy import LocalPolicy
from actors.core.sampling import SamplingParams
from actors.engine.base import DrafterEngine
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.drafters.mtp import MtpModel
from actors.engine.drafters.pair_engine import PairEngine
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu.rank_engines import HIDDEN, LAYERS, VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import mtp_config, random_model, tiny_config

EPS = 1e-5
LAYER = LAYERS - 1  # the one whose MLP writes; the others write nothing at all


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny Llama that looks one token back, on disk and as tensors; embeddings have unit root mean square."""
    path = tmp_path_factory.mktemp("bigram")
    write_tiny_llama(path)
    weights = load_file(path / "model.safetensors")
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"].zero_()
        if layer != LAYER:
            weights[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
    embed = F.rms_norm(weights["model.embed_tokens.weight"], (HIDDEN,), None, EPS)
    weights["model.embed_tokens.weight"] = embed
    save_file(weights, path / "model.safetensors")
    return path, weights


def options(gamma: int) -> DrafterOptions:
    return DrafterOptions(DRAFTER.name, gamma, draft_top_k=VOCAB, dtype=torch.float32)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), None, EPS)


def dspark_copy(weights: dict[str, Tensor]) -> DrafterEngine:
    """Base logits zero; the bias of a token is what the target answers to it."""
    model = random_model(
        tiny_config(
            vocab_size=VOCAB, draft_vocab_size=VOCAB, markov_rank=HIDDEN, target_layer_ids=(0, 2)
        )
    )
    assert isinstance(model, DSparkModel)
    assert model.markov_head is not None
    assert model.confidence_head is not None
    mlp = f"model.layers.{LAYER}.mlp."
    embed = weights["model.embed_tokens.weight"]
    x = normed(embed)
    inner = F.silu(x @ weights[f"{mlp}gate_proj.weight"].T) * (
        x @ weights[f"{mlp}up_proj.weight"].T
    )
    model.markov_head.markov_w1.weight.copy_(
        normed(embed + inner @ weights[f"{mlp}down_proj.weight"].T)
    )
    model.markov_head.markov_w2.weight.copy_(weights["lm_head.weight"])
    model.norm.weight.zero_()
    model.confidence_head.proj.weight.zero_()
    model.confidence_head.proj.bias.fill_(9.0)
    return DSparkEngine(model, ConfidenceTables.identity(5), options(5), "copy")


def mtp_copy(weights: dict[str, Tensor]) -> DrafterEngine:
    """The target's last layer behind a projection that lets only the token through."""
    config = mtp_config(
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        intermediate_size=weights[f"model.layers.{LAYER}.mlp.up_proj.weight"].shape[0],
    )
    model = random_model(config)
    assert isinstance(model, MtpModel)
    model.embed.copy_(weights["model.embed_tokens.weight"])
    model.head.copy_(weights["lm_head.weight"])
    for name, parameter in model.layer.named_parameters():
        parameter.copy_(weights[f"model.layers.{LAYER}.{name}"])
    model.norm.weight.fill_(1.0)
    model.enorm.weight.fill_(1.0)
    model.eh_proj.weight.copy_(torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)), 1))
    return PairEngine(model, options(1), "copy")


def target(path: Path, taps: tuple[int, ...]) -> TorchTargetEngine:
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "max_model_len": 128},
            "target": {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64},
        }
    )
    return load_engine(config, tap_layer_ids=taps)


@pytest.mark.parametrize("copy", [dspark_copy, mtp_copy])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=5, noise_key=5),
        SamplingParams(temperature=0.8, noise_key=6),
    ],
    ids=["greedy", "coupled", "rejection"],
)
def test_a_copied_target_as_drafter_is_always_accepted(
    tensors: tuple[Path, dict[str, Tensor]], copy: object, params: SamplingParams
) -> None:
    path, weights = tensors
    own = copy(weights)  # type: ignore[operator]
    gamma = own.spec.gamma
    engine = target(path, own.spec.tap_layer_ids)
    rank = make_rank(
        LocalPolicy("static_length", static_length=gamma),
        num_blocks=engine.spec.num_blocks,
        block_size=engine.spec.block_size,
        max_model_len=128,
        vocab_size=VOCAB,
        max_batch_tokens=64,
        gamma=gamma,
    )
    session = Session(rank, target=engine, drafter=own)
    for i in range(4):
        message = admitted(f"r{i}", [5 + i, 9, 40 + i], 31)
        key = params.noise_key + i
        session.submit(replace(message, sampling=replace(params, noise_key=key)))
    session.run()
    counters = rank.counters.acceptance
    assert counters.accepted.tolist() == counters.scheduled.tolist()
    assert counters.scheduled.sum() >= 4 * 30 * gamma // (gamma + 1) - 4 * gamma
    assert len({tuple(stream.tokens) for stream in session.streams.values()}) == 4
