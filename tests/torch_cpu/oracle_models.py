"""Loading the oracle's checkpoints, and what transformers expects of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from torch import Tensor

from actors.engine.expert_group import ExpertGroup
from actors.engine.target_engine import TorchTargetEngine, load_engine
from actors.engine.trial import TrialSequences
from configs.schema import ClusterConfig

NAMES = (
    "llama",
    "llama_biased",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_unnormalised",
    "mixtral",
    "mistral",
    "qwen2_windowed",
    "qwen3_layer_types",
    "qwen3_moe_windowed",
)
TAPS = (0, 1)


@dataclass(frozen=True)
class Expected:
    """Rows of transformers' full forward passes."""

    token_ids: list[np.ndarray]  # [n]
    logits: list[Tensor]  # [n, vocab]
    taps: list[Tensor]  # [n, 2 * hidden]; none of the bundled model


def expected(model_dir: Path) -> Expected:
    with safe_open(model_dir / "expected.bin", framework="pt") as file:
        names = sorted(file.keys())

        def rows(kind: str) -> list[Tensor]:
            return [file.get_tensor(name) for name in names if name.startswith(f"{kind}.")]

        return Expected([ids.numpy() for ids in rows("ids")], rows("logits"), rows("taps"))


def engine_of(
    model_dir: Path,
    dtype: str = "float32",
    numerics: str = "reproducible",
    taps: tuple[int, ...] = TAPS,
    block_size: int = 8,
    max_model_len: int = 128,
    group: ExpertGroup | None = None,
    **target: object,
) -> TorchTargetEngine:
    config = ClusterConfig.model_validate(
        {
            "model": {
                "path": str(model_dir),
                "dtype": dtype,
                "numerics": numerics,
                "max_model_len": max_model_len,
            },
            "target": {"kv_cache_tokens": 1024, "block_size": block_size, **target},
        }
    )
    return load_engine(config, taps, group=group)


def shuffled(engine: TorchTargetEngine, token_ids: list[np.ndarray]) -> TrialSequences:
    """The sequences over blocks dealt from a shuffled pool."""
    order = np.random.default_rng(7).permutation(engine.store.num_blocks)
    return TrialSequences(engine, token_ids, order)
