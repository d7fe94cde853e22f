"""On a GPU: drafts replayed from captured graphs against drafts computed as they come, and against the CPU's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.engine import DSparkEngine
from tests.torch_cpu.tiny_drafters import (
    Stream,
    commit_batch,
    tiny_config,
    tiny_engine,
    tiny_model,
)

GREEDY = (SamplingParams(temperature=0.0),)
MIXED = (*GREEDY, SamplingParams(temperature=0.9, seed=3, noise_key=3, top_p=0.8))
ROUNDS = (
    {"a": 12, "b": 3, "c": 30, "d": 1, "e": 7},
    {"c": 1, "a": 5, "b": 2, "e": 1, "d": 4},
    {"a": 600, "d": 2, "c": 1},
    {"a": 2, "b": 9, "d": 1},
)


def commits(params: tuple[SamplingParams, ...]) -> list[CommitBatch]:
    config = tiny_config()
    streams = {name: Stream(name, 700, config, seed) for seed, name in enumerate("abcde")}
    length = dict.fromkeys(streams, 0)
    made = []
    for added in ROUNDS:
        entries = []
        for name, count in added.items():
            first = max(length[name] - 1, 0)
            length[name] += count
            entries.append(streams[name].commit(first, length[name]))
        kinds = [params[i % len(params)] for i in range(len(added))]
        made.append(replace(commit_batch(entries), sampling=SamplingBatch.of(kinds)))
    return made


def engine(device: str) -> DSparkEngine:
    return tiny_engine(tiny_model(tiny_config()), device=device)


def drafts(made: DSparkEngine, batches: list[CommitBatch]) -> list[ProposalBatch]:
    found = [made.advance(batch) for batch in batches]
    return [proposal for proposal in found if proposal is not None]


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_replayed_drafts_equal_eager_ones(params: tuple[SamplingParams, ...]) -> None:
    captured, eager = engine("cuda"), engine("cuda")
    eager.use_paged(None)
    batches = commits(params)
    for ours, theirs in zip(drafts(captured, batches), drafts(eager, batches), strict=True):
        assert np.array_equal(ours.draft_token_ids, theirs.draft_token_ids)
        assert np.array_equal(ours.q_ids, theirs.q_ids)
        np.testing.assert_allclose(ours.q_probs, theirs.q_probs, atol=1e-6)
        np.testing.assert_allclose(ours.confidences, theirs.confidences, atol=1e-6)
    assert captured.paged is not None
    assert captured.paged.num_replays == len(ROUNDS)
    assert captured.paged.num_capture_failures == 0


def test_drafts_of_the_gpu_are_those_of_the_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    batches = commits(GREEDY)
    here, there = drafts(engine("cuda"), batches), drafts(engine("cpu"), batches)
    for ours, theirs in zip(here, there, strict=True):
        np.testing.assert_allclose(ours.confidences[:, 0], theirs.confidences[:, 0], atol=1e-3)
        assert (ours.draft_token_ids[:, 0] == theirs.draft_token_ids[:, 0]).all()
