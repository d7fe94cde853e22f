"""What the feed-forwards of a dense model see, and whether two models write the same: forwards over random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.checkpoint import model_config
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.engine.trial import TrialSequences
from configs.schema import ClusterConfig

PROBE_ROWS, PROBE_LEN = 8, 32


@dataclass(frozen=True)
class LayerInputs:
    """Of the normed inputs of one feed-forward: their mean [hidden], how far they lie from it (root mean square)."""

    mean: Tensor
    spread: float


@dataclass(frozen=True)
class Comparison:
    """Two models over the same tokens in fp32."""

    max_logit_difference: float
    num_tokens: int  # greedy tokens compared
    num_equal: int  # of them, before the texts part


def layer_inputs(model_dir: Path, seed: int) -> list[LayerInputs]:
    """One entry a layer, from forwards in fp32 over random tokens."""
    engine = fp32_engine(model_dir)
    observers = [_Observer(layer.mlp) for layer in engine.model.layers]
    for layer, observer in zip(engine.model.layers, observers, strict=True):
        layer.mlp = observer  # type: ignore[assignment]
    rows = TrialSequences(engine, _random_rows(engine, seed, PROBE_ROWS, PROBE_LEN))
    rows.logits(dict.fromkeys(range(PROBE_ROWS), PROBE_LEN))
    return [observer.inputs() for observer in observers]


class _Observer:
    """A feed-forward that remembers what it was given."""

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp
        self._seen: list[Tensor] = []

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        self._seen.append(x.clone())
        done: Tensor = self._mlp.plus(x, residual)
        return done

    def inputs(self) -> LayerInputs:
        seen = torch.cat(self._seen)
        mean = seen.mean(0)
        spread = (seen - mean).square().sum(1).mean().sqrt()
        return LayerInputs(mean, max(float(spread), 1e-6))


def compare(first_dir: Path, second_dir: Path, num_tokens: int = 48, seed: int = 0) -> Comparison:
    """What both models make of a random prompt, and of the text the first one then writes, greedily."""
    logits, texts = [], []
    for model_dir in (first_dir, second_dir):
        engine = fp32_engine(model_dir)
        prompt = _random_rows(engine, seed, 1, PROBE_LEN)[0]
        row = np.concatenate([prompt, np.zeros(num_tokens, np.int64)])
        rows = TrialSequences(engine, [row])
        found = rows.logits({0: PROBE_LEN})
        for place in range(PROBE_LEN, PROBE_LEN + num_tokens):
            row[place] = int(found[-1][-1].argmax())
            found += rows.logits({0: 1})
        logits.append(found[0])  # over the prompt: the same tokens for both
        texts.append(row[PROBE_LEN:])
    differs = np.flatnonzero(texts[0] != texts[1])
    return Comparison(
        max_logit_difference=float((logits[0] - logits[1]).abs().max()),
        num_tokens=num_tokens,
        num_equal=int(differs[0]) if len(differs) else num_tokens,
    )


def fp32_engine(model_dir: Path) -> TorchTargetEngine:
    longest = min(256, model_config(model_dir).max_position)
    return load_engine(
        ClusterConfig.model_validate(
            {
                "model": {"path": str(model_dir), "dtype": "float32", "max_model_len": longest},
                "target": {"kv_cache_tokens": 1024},
            }
        )
    )


def _random_rows(
    engine: TorchTargetEngine, seed: int, num_rows: int, length: int
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    ids = np.random.default_rng(seed).integers(0, engine.spec.vocab_size, (num_rows, length))
    return list(ids)
