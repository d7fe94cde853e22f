"""Blocks that stop early through the real rank: the same texts, and streams that follow the target's law (C1, C3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.rank import Rank
from actors.core.rank_calibration import RankCalibration
from actors.core.sampling import SamplingParams
from actors.engine.drafters import stopped
from actors.engine.drafters.drafted import DraftedBlock
from actors.engine.target_engine import TorchTargetEngine, load_engine
from configs.calibration import CalibrationConfig
from configs.schema import ClusterConfig
from kernels.block_reference import DraftSampling, MarkovHead
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.rank_engines import VOCAB, write_tiny_llama
from tests.torch_cpu.table_streams import (
    CONFIDENCE_AFTER,
    LIMIT,
    Q_AFTER,
    V,
    chi_squared,
    small_rank,
    staircase,
    streams_of,
)
from tests.torch_cpu.test_stopped_law import MUTANTS, TableSlots
from tests.torch_cpu.tiny_drafters import tiny_config, tiny_engine, tiny_model

GAMMA = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TorchTargetEngine]:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_llama(path)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "max_model_len": 128},
            "target": {"kv_cache_tokens": 2048, "block_size": 8, "max_batch_tokens": 99},
        }
    )
    return lambda: load_engine(config, tap_layer_ids=(0, 2))


def serve(engine: TorchTargetEngine, policy: LocalPolicy, stop_share: float) -> Session:
    """Greedy, seeded and unseeded requests with a drafter whose every weight is noise."""
    spec = engine.spec
    model = tiny_model(tiny_config(block_size=GAMMA, vocab_size=VOCAB, draft_vocab_size=VOCAB))
    rank = make_rank(
        policy,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        vocab_size=VOCAB,
        max_batch_tokens=99,
        gamma=GAMMA,
        stop_share=stop_share,
        calibration=RankCalibration(GAMMA, CalibrationConfig(), policy.name, stops=True),
    )
    drafter = tiny_engine(model, name=DRAFTER.name)
    session = Session(rank, target=engine, drafter=drafter)
    for i in range(6):
        prompt = [3 + (i * 7 + k * k) % 11 for k in range(1 + 4 * i)]
        seeded = SamplingParams(temperature=0.7 + 0.1 * i, top_p=0.9, seed=i, noise_key=i)
        params = SamplingParams(temperature=0.0) if i % 2 else seeded
        session.submit(replace(admitted(f"r{i}", prompt, 30), sampling=params))
    session.run()
    return session


@pytest.mark.parametrize("price", [0.05, 0.4])
def test_greedy_and_seeded_texts_are_the_same_with_stopping_and_without(
    price: float, target: Callable[[], TorchTargetEngine]
) -> None:
    policy = LocalPolicy("static_threshold", static_threshold=price)
    whole, stops = serve(target(), policy, 0.0), serve(target(), policy, 1.0)
    plain = serve(target(), LocalPolicy("none"), 0.0)
    for name, stream in plain.streams.items():
        assert stops.streams[name].tokens == whole.streams[name].tokens == stream.tokens
    assert whole.rank.counters.num_undrafted == 0
    assert stops.rank.counters.num_undrafted > 0
    for session in (whole, stops):
        assert session.rank.counters.acceptance.scheduled.sum() > 0


# --- the law of unseeded streams -------------------------------------------------------------------------------------


class StoppingDrafter:
    """Drafts from the table's law with the code that serves; a confidence tells of the token before."""

    def __init__(self, gamma: int, draft: Callable[..., DraftedBlock]) -> None:
        self._gamma, self._draft = gamma, draft
        self._markov = MarkovHead(torch.eye(V), torch.from_numpy(np.log(Q_AFTER).T).float())
        self.num_fillers = 0

    def close(self, request_ids: tuple[str, ...]) -> None:
        pass

    def advance(self, commit: CommitBatch) -> ProposalBatch | None:
        wants = np.flatnonzero(commit.wants_block)
        if not len(wants):
            return None
        confidence = np.broadcast_to(CONFIDENCE_AFTER, (self._gamma, V)).copy()
        block = self._draft(
            TableSlots(torch.zeros(len(wants), self._gamma, V), confidence),
            self._markov,
            torch.from_numpy(commit.anchor_token_ids[wants].astype(np.int64)),
            torch.from_numpy(commit.committed_lens[wants].astype(np.int64)) - 1,
            DraftSampling.of(commit.sampling.rows(wants)),
            torch.from_numpy(commit.min_survivals[wants]),
            self._gamma,
            V,
        )
        assert block.draft_lens is not None
        self.num_fillers += int((self._gamma - block.draft_lens).sum())
        return ProposalBatch(
            DRAFTER.name,
            tuple(commit.request_ids[i] for i in wants.tolist()),
            commit.generations[wants],
            commit.committed_lens[wants],
            block.draft_token_ids.int().numpy(),
            block.confidences.numpy(),
            block.q_ids.int().numpy(),
            block.q_probs.numpy(),
            0.0,
            block.draft_lens.int().numpy(),
        )


def rank_that_stops(name: Any, gamma: int) -> Rank:
    policy = LocalPolicy(name, static_threshold=0.3)
    policy.times.measured(staircase())
    rank = small_rank(policy, gamma=gamma)
    rank.limits = replace(rank.limits, stop_share=0.9)
    config = CalibrationConfig(explore_share=0.25)
    rank.calibration = RankCalibration(gamma, config, name, stops=True)
    return rank


@pytest.mark.parametrize("name", ["static_threshold", "lagged"])
def test_streams_follow_the_law_of_the_target_wherever_their_blocks_stop(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped, "LEAST_DRAFTED", 0)  # streams are three tokens long
    drafter = StoppingDrafter(2, stopped.draft_while_worth)
    counts = streams_of(rank_that_stops(name, 2), seed=1, drafter=drafter)
    assert chi_squared(counts) < LIMIT
    assert drafter.num_fillers > 500


def test_a_stop_that_looks_at_the_token_itself_is_found_out() -> None:
    broken = mutant(stopped, *MUTANTS["a stop decided after a look at the slot's own token"])
    vars(broken)["LEAST_DRAFTED"] = 0
    drafter = StoppingDrafter(2, broken.draft_while_worth)
    rank = rank_that_stops("static_threshold", 2)
    rank.calibration = RankCalibration(2)  # an explored round has no stop
    assert chi_squared(streams_of(rank, seed=1, drafter=drafter)) > 2 * LIMIT
