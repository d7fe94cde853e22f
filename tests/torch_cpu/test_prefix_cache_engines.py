"""Real engines behind the prefix cache: a hit changes what is computed, never a token, and no proposal (C1, C7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.sampling import SamplingParams
from actors.engine.base import DrafterEngine
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.ngram import NgramEngine
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import engine_for
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.schema import ClusterConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu.rank_engines import VOCAB, write_tiny_llama
from tests.torch_cpu.tiny_drafters import every_config, random_model

NUM_NEW = 20
NAMES = [*every_config(), "ngram"]
PROMPT = [3 + (k * k + k // 7) % 60 for k in range(45)]
FIRST = {"greedy": 80, "seeded": 81}  # other beginnings, so that each cold run is cold
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=5, noise_key=5),
}


class Recorder:
    """A drafter, and what it proposed for each request at each length."""

    def __init__(self, engine: DrafterEngine) -> None:
        self.engine = engine
        self.proposals: dict[str, dict[int, tuple[list[int], Any]]] = defaultdict(dict)

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        proposals = self.engine.advance(batch)
        for row, name in enumerate(proposals.request_ids if proposals else ()):
            assert proposals is not None
            block = proposals.draft_token_ids[row].tolist(), proposals.q_probs[row]
            self.proposals[name][int(proposals.committed_lens[row])] = block
        return proposals

    def close(self, request_ids: tuple[str, ...]) -> None:
        self.engine.close(request_ids)


def drafter(name: str, gamma: int) -> DrafterEngine:
    if name == "ngram":
        return NgramEngine(DRAFTER.name, gamma, 8)
    config = every_config(block_size=gamma)[name]
    options = DrafterOptions(DRAFTER.name, dtype=torch.float32, draft_top_k=8)
    return engine_for(
        random_model(config), ConfidenceTables.identity(config.block_size), options, "test"
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TorchTargetEngine]:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "max_model_len": 128},
            "target": {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 64},
        }
    )
    return lambda taps: load_engine(config, tap_layer_ids=taps)


def serve(
    engine: TorchTargetEngine, own: Any, orders: list[tuple[str, list[int], SamplingParams]],
    gamma: int, chunk: int = 24, **limits: object,
) -> Session:  # fmt: skip
    """One request after the other through one rank."""
    spec = engine.spec
    rank = make_rank(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        vocab_size=VOCAB,
        max_batch_tokens=chunk,
        gamma=gamma,
        **limits,
    )
    session = Session(rank, target=engine, drafter=own)
    for name, prompt, params in orders:
        session.submit(replace(admitted(name, prompt, NUM_NEW), sampling=params))
        session.run()
    assert rank.check_idle() == []
    return session


@pytest.mark.parametrize("name", NAMES)
def test_a_hit_gives_the_tokens_and_the_proposals_of_a_cold_run(
    target: Callable[..., TorchTargetEngine], name: str
) -> None:
    gamma = 1 if name == "mtp" else 3
    own = Recorder(drafter(name, gamma))
    engine = target(own.engine.spec.tap_layer_ids)
    orders = []
    for rule, params in SAMPLING.items():
        prompt = [FIRST[rule], *PROMPT]
        orders += [(f"cold {rule}", prompt, params), (f"hit {rule}", prompt, params)]
        orders.append((f"plain {rule}", prompt, replace(params, speculation=False)))
    session = serve(engine, own, orders, gamma)
    tokens = {key: stream.tokens for key, stream in session.streams.items()}
    for rule, params in SAMPLING.items():
        assert tokens[f"hit {rule}"] == tokens[f"plain {rule}"] == tokens[f"cold {rule}"]
        alone = serve(
            engine, None, [("r", [FIRST[rule], *PROMPT], params)], 0, 11, prefix_cache=False
        )
        assert tokens[f"hit {rule}"] == alone.streams["r"].tokens
        cold, hit = own.proposals[f"cold {rule}"], own.proposals[f"hit {rule}"]
        assert cold.keys() == hit.keys() and cold
        for length, (block, q_probs) in cold.items():
            assert hit[length][0] == block
            np.testing.assert_allclose(hit[length][1], q_probs, atol=1e-5)
        cold_end, hit_end = (session.streams[f"{kind} {rule}"].last for kind in ("cold", "hit"))
        assert cold_end is not None and hit_end is not None
        assert (hit_end.num_cached, cold_end.num_cached) == (40, 0)
        assert hit_end.num_accepted == cold_end.num_accepted
        assert hit_end.num_rounds == cold_end.num_rounds
    assert own.engine.open_requests() == ()


def test_a_restarted_drafter_proposes_what_it_would_have(
    target: Callable[..., TorchTargetEngine],
) -> None:
    name, gamma = NAMES[0], 3
    blocks = []
    for restarts in (False, True):
        own = Recorder(drafter(name, gamma))
        engine = target(own.engine.spec.tap_layer_ids)
        session = serve(engine, own, [], gamma)
        session.submit(admitted("r", PROMPT, NUM_NEW))
        for _ in range(4):
            session.step()
        if restarts:
            own.engine = drafter(name, gamma)
            session.rank.set_drafters([replace(DRAFTER, epoch="2")])
            session.step()
        session.run()
        blocks.append(own.proposals["r"])
    undisturbed, restarted = blocks
    assert restarted.keys() <= undisturbed.keys() and max(restarted) == max(undisturbed)
    for length, (block, _) in restarted.items():
        assert undisturbed[length][0] == block
