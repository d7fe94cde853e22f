"""C1 and C3 with blocks that stop, by enumeration: also for whoever verified what was not drafted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from actors.core.draft_stop import LEAST_DRAFTED
from actors.core.sampling import SamplingParams
from actors.engine.drafters import stopped
from actors.engine.drafters.stopped import draft_while_worth
from kernels.block_reference import BlockSample, DraftSampling, MarkovHead
from tests.torch_cpu.exact_law import Code, drafted, output_law, round_laws, total_variation
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.test_losslessness import (
    PARAMS,
    PLAIN,
    SCHEDULERS,
    Scheduler,
    uniform_length,
)
from tests.torch_cpu.tiny_pair import TinyPair, target_law


class TableSlots:
    """A drafter that is two tables: base logits [N, gamma, V'] and the confidence [gamma, V] after a token."""

    def __init__(self, base: Tensor, confidence: npt.NDArray[np.float32]) -> None:
        self._base, self._confidence = base, torch.from_numpy(confidence)

    def logits(self, rows: Tensor, start: int, end: int) -> Tensor:
        return self._base[rows, start:end]

    def confidences(self, rows: Tensor, slot: int, previous: Tensor) -> Tensor:
        return self._confidence[slot, previous]


def stopping(
    confidence: npt.NDArray[np.float32], stop: float, draft: Callable[..., Any] = draft_while_worth
) -> Code:
    """The code that serves, with blocks that end where their survival falls below `stop`."""

    def sample_block(
        base: Tensor,
        markov: MarkovHead,
        anchors: Tensor,
        positions: Tensor,
        sampling: DraftSampling,
        draft_top_k: int,
        d2t: Tensor | None,
        draws: Tensor,
    ) -> BlockSample:
        stops = torch.full((len(anchors),), stop)
        block = draft(
            TableSlots(base, confidence), markov, anchors, positions, sampling, stops,
            base.shape[1], draft_top_k, d2t, draws,
        )  # fmt: skip
        return BlockSample(block.draft_token_ids, block.q_ids, block.q_probs, None)

    return Code(sample_block=sample_block)


def survivals(
    pair: TinyPair, anchor: int, tokens: npt.NDArray[np.int64], stop: float, least: int
) -> npt.NDArray[np.float32]:
    """What a rank is told: zeros from the stop on."""
    found = pair.survivals(anchor, tokens)
    goes_on = (found >= np.float32(stop)) | (np.arange(pair.gamma) < least)
    return found * np.logical_and.accumulate(goes_on, axis=1)


def law_error(
    pairs: list[TinyPair],
    params: list[SamplingParams],
    schedule: Scheduler,
    stop: float,
    least: int,
    draft: Callable[..., Any] = draft_while_worth,
) -> float:
    """Largest distance of a request's output law from the target's; see `test_losslessness.law_error`."""
    each = [(p, r % p.vocab, q) for r, (p, q) in enumerate(zip(pairs, params, strict=True))]
    blocks, laws, believed = [], [], []
    for pair, anchor, own in each:
        code = stopping(pair.confidence, stop, draft)
        block = drafted(code, pair, anchor, own, len(pair.base[0]))
        blocks.append(block)
        laws.append(round_laws(code, pair, anchor, own, block))
        believed.append(survivals(pair, anchor, block.tokens, stop, least))
    outputs = output_law(blocks, laws, believed, schedule)
    return max(
        total_variation(law, target_law(*one)) for law, one in zip(outputs, each, strict=True)
    )


def pair_of(seed: int, gamma: int = 3, d2t: list[int] | None = None) -> TinyPair:
    return TinyPair.random(seed, gamma=gamma, vocab=3, dtype=torch.float64, d2t=d2t)


def sometimes_stopping() -> TinyPair:
    """Its blocks stop before the third slot after token 0, and only then."""
    confidence = np.array([[0.9] * 3, [0.9] * 3, [0.1, 0.6, 0.9]], np.float32)
    return replace(pair_of(1), confidence=confidence)


@pytest.mark.parametrize("verify_len", [2, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_whoever_verified_what_was_not_drafted_would_keep_the_law(
    name: str, verify_len: int
) -> None:
    pair, stop = sometimes_stopping(), 0.4
    lens = survivals(pair, 0, drafted(Code(), pair, 0, PLAIN, 3).tokens, stop, LEAST_DRAFTED) > 0
    assert 0 < lens[:, 2].mean() < 1, "some blocks must stop, others not"
    error = law_error([pair], [PARAMS[name]], uniform_length(verify_len), stop, LEAST_DRAFTED)
    assert error < 1e-9


def test_a_reduced_vocabulary_keeps_the_law_too() -> None:
    pair = replace(pair_of(3, d2t=[2, 0]), confidence=sometimes_stopping().confidence)
    assert law_error([pair], [PLAIN], uniform_length(3), 0.4, LEAST_DRAFTED) < 1e-9


@pytest.mark.parametrize("name", SCHEDULERS)
def test_requests_that_compete_for_a_budget_keep_their_laws_wherever_blocks_stop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = (
        1 if name == "none" else 0
    )  # with blocks of two the least that is served would leave none to stop
    monkeypatch.setattr(stopped, "LEAST_DRAFTED", least)
    pairs = [pair_of(seed, gamma=2) for seed in (5, 6, 7)]
    params = [PLAIN, PARAMS["top_k"], PARAMS["hot"]]
    assert law_error(pairs, params, SCHEDULERS[name](), 0.3, least) < 1e-9


MUTANTS = {
    "a stop decided after a look at the slot's own token": (
        "        block.draft_lens[rows] += 1\n",
        "        ahead = survival * slots.confidences(rows, min(slot + 1, gamma - 1), previous)\n"
        "        gone = rows[ahead < stops[rows]]\n"
        "        block.draft_lens[rows[ahead >= stops[rows]]] += 1\n"
        "        block.draft_token_ids[gone, slot] = anchor_ids[gone]\n"
        "        block.q_ids[gone, slot] = -1\n"
        "        block.q_ids[gone, slot, 0] = anchor_ids[gone]\n"
        "        block.q_probs[gone, slot] = 0.0\n"
        "        block.q_probs[gone, slot, 0] = 1.0\n",
    ),
    "a filler that may have been another": (
        "q_ids[..., 0], q_probs[..., 0] = tokens, 1.0",
        "q_ids[..., 0], q_probs[..., 0] = tokens, 0.5",
    ),
    "a filler that is not the token q tells of": (
        "q_ids[..., 0], q_probs[..., 0] = tokens, 1.0",
        "q_ids[..., 0], q_probs[..., 0] = (tokens + 1) % 3, 1.0",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_stopping_is_caught(name: str) -> None:
    old, new = MUTANTS[name]
    broken = mutant(stopped, old, new)
    error = law_error(
        [sometimes_stopping()],
        [PLAIN],
        uniform_length(3),
        0.4,
        LEAST_DRAFTED,
        broken.draft_while_worth,
    )
    assert error > 1e-3
