"""A rank with a drafter that knows how sure it should be, and says so or not."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from actors.core.evidence import to_probability
from actors.core.local_policy import LocalPolicy
from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.rank_calibration import RankCalibration
from configs.calibration import CalibrationConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import (
    DRAFTER,
    VOCAB,
    Context,
    ScriptedDrafter,
    true_token,
)

GAMMA = 5
OFTEN = CalibrationConfig(explore_share=0.25)


class TruthfulDrafter(ScriptedDrafter):
    """Knows how likely each of its tokens is right, and says `bias` logits more."""

    def __init__(self, bias: float, seed: int = 0) -> None:
        super().__init__(DRAFTER, GAMMA, 0.0, random.Random(seed))
        self.bias, self.draws = bias, np.random.default_rng(seed)
        self._said: list[np.ndarray] = []

    def blocks(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidences [count, GAMMA], and whether each token is right."""
        truth = self.draws.normal(0.3, 1.2, (count, GAMMA))
        right = self.draws.random((count, GAMMA)) < to_probability(truth)
        return to_probability(truth + self.bias).astype(np.float32), right

    def advance(self, batch: CommitBatch) -> ProposalBatch | None:
        self._said = []
        proposal = super().advance(batch)
        return proposal and replace(proposal, confidences=np.concatenate(self._said))

    def _block(self, context: Context, anchor: int) -> list[int]:
        confidences, right = self.blocks(1)
        self._said.append(confidences)
        prefix, block = [*context.tokens, anchor], []
        for is_right in right[0]:
            block.append((true_token(prefix) + (0 if is_right else 1)) % VOCAB)
            prefix.append(block[-1])
        return block


def session(
    bias: float,
    config: CalibrationConfig | None = None,
    policy: str = "static_threshold",
    **limits: object,
) -> Session:
    config = config or CalibrationConfig()
    local = LocalPolicy(policy, static_length=1, static_threshold=0.1)  # type: ignore[arg-type]
    limits = {"max_batch_tokens": 64, "max_waiting": 64, **limits}
    calibration = RankCalibration(GAMMA, config, policy)
    rank = make_rank(local, gamma=GAMMA, calibration=calibration, **limits)
    return Session(rank, drafter=TruthfulDrafter(bias))


def serve(served: Session, num_rounds: int, **sampling: object) -> list[str]:
    """At least `num_rounds` more, eight streams at a time; the notes on the way."""
    acceptance, notes = served.rank.counters.acceptance, []
    until = acceptance.num_rounds + num_rounds
    while acceptance.num_rounds < until:
        while len(served.rank.book.live) < 8:
            served.submit(admitted(f"r{len(served.streams)}", [3, 1, 4], 60, **sampling))
        served.step()
        notes += served.rank.notes
    return notes
