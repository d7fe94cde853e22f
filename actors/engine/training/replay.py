"""Rounds of speculative decoding over text that is known: which anchors they visit, and what each accepts.

Acceptance is a probability a slot (see `slot_law`), so counts are expectations over all ways decoding could have gone
through the text, by one pass over its anchors; at temperature 0 every probability is 0 or 1 and they are counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass
class Blocks:
    """Every block of one answer: one row an anchor, in order."""

    accept: Float64  # [A, gamma] probability that a slot that is reached is accepted; 0 beyond the text's end
    prefix: BoolArray  # [A, gamma] one draw: all draft tokens up to here are accepted
    inside: BoolArray  # [A, gamma] the slot lies within the text
    confidence_logits: npt.NDArray[np.float32]  # [A, gamma]
    domain: str = ""
    record_id: str = ""

    def visited(self) -> list[int]:
        """Return the anchors (rows) that decoding visits under `prefix`."""
        lengths = self.prefix.sum(1)
        visited, at = [], 0
        while at < len(lengths):
            visited.append(at)
            at += int(lengths[at]) + 1
        return visited


@dataclass
class Acceptance:
    """Expected rounds over some answers, with blocks of one length."""

    gamma: int
    committed: float = 0.0  # tokens, bonus included
    rounds: float = 0.0
    whole_rounds: float = 0.0  # whose block lies within the text
    accepted_at: Float64 = field(default_factory=lambda: np.zeros(0))  # [gamma] of the whole rounds

    @property
    def length(self) -> float:
        """Acceptance length: committed tokens a round."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def survival(self) -> Float64:
        """Share of whole rounds that accept at least k tokens, [gamma]."""
        share: Float64 = self.accepted_at / max(self.whole_rounds, 1e-9)
        return share

    @property
    def conditional(self) -> Float64:
        """Share of slots accepted among those reached, [gamma]: what the paper's Figure 2 shows."""
        return conditional(self.survival)

    def add(self, blocks: Blocks) -> None:
        """Add the rounds of one answer."""
        survival: Float64 = np.cumprod(blocks.accept[:, : self.gamma], axis=1, dtype=np.float64)
        weight = visit_probabilities(survival)
        whole = weight * blocks.inside[:, self.gamma - 1]
        self.rounds += float(weight.sum())
        # Every answer token after the first is committed in some round; the text ends with the answer.
        self.committed += len(survival)
        self.whole_rounds += float(whole.sum())
        at_slot = whole @ survival
        self.accepted_at = at_slot if not len(self.accepted_at) else self.accepted_at + at_slot


def conditional(survival: Float64) -> Float64:
    """Return each position's acceptance given the ones before, from survivals [gamma]."""
    reached = np.concatenate([[1.0], survival[:-1]])
    share: Float64 = np.divide(survival, reached, out=np.zeros_like(survival), where=reached > 0)
    return share


def visit_probabilities(survival: Float64) -> Float64:
    """Return the probability [A] that an anchor starts a round.

    survival [A, gamma]: a round at anchor a goes on at a + 1 + j when it accepts exactly j tokens, with probability
    survival[a, j - 1] - survival[a, j].
    """
    count, gamma = survival.shape
    ends = -np.diff(survival, axis=1, prepend=1.0, append=0.0)  # [A, gamma + 1] exactly j accepted
    visits = np.zeros(count + gamma + 1)
    visits[0] = 1.0
    for at in range(count):
        visits[at + 1 : at + gamma + 2] += visits[at] * ends[at]
    return visits[:count]


def pooled(
    every: Sequence[Blocks],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return confidence logits [rounds, gamma] and tokens accepted [rounds] of the rounds decoding makes.

    Rounds start where the one before was refused, so they are harder than an average position; calibration must see
    what serving sees. Nothing is censored: whole blocks are judged. Blocks that reach beyond their text are left out.
    """
    logits, accepted = [], []
    for blocks in every:
        rows = [a for a in blocks.visited() if blocks.inside[a].all()]
        logits.append(blocks.confidence_logits[rows])
        accepted.append(blocks.prefix[rows].sum(1))
    return np.concatenate(logits), np.concatenate(accepted)


@dataclass(frozen=True)
class Kept:
    """What verifying only confident prefixes comes to: committed and verified tokens a round (anchor included)."""

    threshold: float
    length: float
    verified: float


def above_threshold(
    every: Sequence[Blocks], confidences: Sequence[npt.NDArray[np.floating]], threshold: float
) -> Kept:
    """Replay with slots verified only up to the first whose confidence lies below `threshold` (spec 3.3, 6.6).

    confidences: [A, gamma] conditional ones of each answer's blocks.
    """
    committed, rounds, verified = 0.0, 0.0, 0.0
    for blocks, own in zip(every, confidences, strict=True):
        keep = np.logical_and.accumulate(own >= threshold, axis=1)
        survival: Float64 = np.cumprod(blocks.accept * keep, axis=1, dtype=np.float64)
        weight = visit_probabilities(survival)
        committed += len(keep)
        rounds += float(weight.sum())
        verified += float(weight @ (1.0 + keep.sum(axis=1)))
    return Kept(threshold, committed / rounds, verified / rounds)
