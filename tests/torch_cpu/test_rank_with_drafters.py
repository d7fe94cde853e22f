"""Every kind of drafter through the real rank: it may change how fast a stream comes, never what it says (C1, C3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.local_policy import LocalPolicy
from actors.core.sampling import SamplingParams
from actors.engine.base import DrafterEngine
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.ngram import NgramEngine
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import engine_for
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu import table_streams
from tests.torch_cpu.rank_engines import VOCAB, write_tiny_llama
from tests.torch_cpu.table_streams import LIMIT, chi_squared, small_rank, staircase, streams_of
from tests.torch_cpu.tiny_drafters import every_config, random_model

GAMMA, NUM_NEW = 3, 24
NAMES = [*every_config(), "ngram"]


def gamma_of(name: str, gamma: int) -> int:
    return 1 if name == "mtp" else gamma


def drafter(name: str, gamma: int, draft_top_k: int = 8, **changes: Any) -> DrafterEngine:
    if name == "ngram":
        return NgramEngine(DRAFTER.name, gamma, draft_top_k)
    config: DrafterConfig = every_config(block_size=gamma, **changes)[name]
    options = DrafterOptions(DRAFTER.name, dtype=torch.float32, draft_top_k=draft_top_k)
    return engine_for(
        random_model(config), ConfidenceTables.identity(config.block_size), options, "test"
    )


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def target(tiny_dir: Path) -> Callable[[tuple[int, ...]], TorchTargetEngine]:
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(tiny_dir), "dtype": "float32", "max_model_len": 128},
            "target": {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64},
        }
    )
    return lambda taps: load_engine(config, tap_layer_ids=taps)


def messages() -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Greedy and seeded requests; prompts repeat themselves, so that a lookup finds something."""
    for i in range(6):
        prompt = [3 + (i * 7 + k * k) % 11 for k in range((1, 5, 9, 20, 33, 40)[i])]
        seeded = SamplingParams(temperature=0.6 + 0.1 * i, top_p=0.9, seed=i, noise_key=i)
        yield f"r{i}", prompt, SamplingParams(temperature=0.0) if i % 2 else seeded


def serve(engine: TorchTargetEngine, gamma: int, policy: LocalPolicy | None, own: Any) -> Session:
    spec = engine.spec
    rank = make_rank(
        *([policy] if policy else []),
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        vocab_size=VOCAB,
        max_batch_tokens=24,
        gamma=gamma,
    )
    session = Session(rank, target=engine, drafter=own)
    for name, prompt, params in messages():
        session.submit(replace(admitted(name, prompt, NUM_NEW), sampling=params))
        session.step()
    session.run()
    assert rank.check_idle() == []
    return session


def texts(session: Session) -> dict[str, list[int]]:
    return {name: stream.tokens for name, stream in session.streams.items()}


@pytest.mark.parametrize("policy", ["static_length", "lagged"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_and_seeded_streams_are_what_they_are_without_a_drafter(
    target: Callable[[tuple[int, ...]], TorchTargetEngine], name: str, policy: Any
) -> None:
    plain = texts(serve(target(()), 0, None, None))
    gamma = gamma_of(name, GAMMA)
    own = drafter(name, gamma)
    engine = target(own.spec.tap_layer_ids)
    session = serve(engine, gamma, LocalPolicy(policy, static_length=gamma), own)
    assert texts(session) == plain
    assert own.open_requests() == ()
    counters = session.rank.counters
    assert counters.acceptance.scheduled.sum() > 0
    assert counters.num_late == 0
    assert session.rank.book.drafts.dropped.total() == 0


def noise_drafter(name: str, gamma: int) -> tuple[DrafterEngine, table_streams.TableTarget]:
    """A drafter whose weights are noise over three tokens, and a target whose features tell these tokens apart."""
    shape = {"vocab_size": table_streams.V, "draft_vocab_size": table_streams.V}
    own = drafter(name, gamma, draft_top_k=table_streams.V, **shape)
    rng = np.random.default_rng(0)
    table = rng.standard_normal((table_streams.V, own.spec.feature_dim)).astype(np.float32)
    return own, table_streams.TableTarget(table)


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "lagged") for name in NAMES), ("rnn", "static_threshold"), ("eagle3", "algorithm1")],
)
def test_unseeded_streams_follow_the_law_of_the_target(name: str, policy: Any) -> None:
    gamma = gamma_of(name, table_streams.GAMMA)
    local = LocalPolicy(policy, static_threshold=0.3)
    local.times.measured(staircase())
    # Few enough rows that drafts pay on the staircase, also when the prefix cache leaves no prompts to ride along.
    rank = small_rank(local, max_batch_tokens=240, gamma=gamma, max_running=24)
    prompt = (0, 1, 2, 0, 2, 1, 0)
    own, target = noise_drafter(name, gamma)
    counts = streams_of(rank, 1, own, target=target, prompt=prompt, num_streams=1800)
    counters = rank.counters.acceptance
    assert 0 < counters.accepted.sum() < counters.scheduled.sum()
    assert chi_squared(counts) < LIMIT
