"""What a round costs for blocks of several lengths, and which share of it drafting has.

The drafter computes in a process of its own, as it is served, and takes turns with the target, as they do there: a
round is commits to the drafter, its blocks back, one step of the target. What is verified stays the same, as a budget
would have it; only the block gets longer. Lengths are measured in turn and the turns repeated, so that what else the
machine does falls on all alike; medians are reported, of growth that of each repeat's own ratio. On a machine that
others use, processor time tells more than the clock.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.trial import trial_commit
from actors.engine.training.drafter_process import DrafterProcess
from actors.engine.training.frozen_target import FrozenTarget
from configs.machine import multiplies_bfloat16

BATCH = 16
CONTEXT_LEN = 128
GAMMAS = (4, 8, 12, 16)
REPEATS = 8


@dataclass(frozen=True)
class Turn:
    """Seconds of one round."""

    draft: float  # in the drafter's engine
    verify: float  # the target's step
    whole: float  # both, and what goes between the processes
    processor: float  # of both, over all threads: what another process takes does not enter


@dataclass(frozen=True)
class Latency:
    """Rounds of `batch` requests by block length, in the order they were measured; the target verifies `verified`."""

    batch: int
    verified: int
    turns: dict[int, list[Turn]]

    def report(self) -> dict[str, Any]:
        """Return for JSON: medians in milliseconds, drafting's share of a round, and what a longer block adds to it."""
        draft, whole = ({g: self._ms(g, part) for g in self.turns} for part in ("draft", "whole"))
        verify = 1e3 * float(np.median([t.verify for own in self.turns.values() for t in own]))
        found = {
            "batch": self.batch,
            "verified_a_request": self.verified,
            "repeats": len(next(iter(self.turns.values()))),
            "draft_ms_by_gamma": {str(g): round(ms, 3) for g, ms in draft.items()},
            "verify_ms": round(verify, 3),
            "round_ms_by_gamma": {str(g): round(ms, 3) for g, ms in whole.items()},
            "draft_share_of_round": {str(g): round(draft[g] / whole[g], 4) for g in self.turns},
        }
        if {min(GAMMAS), max(GAMMAS)} <= set(self.turns):
            short, long = min(GAMMAS), max(GAMMAS)
            found["round_growth"] = self.growth(short, long, "whole")
            found["processor_time_growth"] = self.growth(short, long, "processor")
        return found

    def growth(self, short: int, long: int, part: str) -> dict[str, Any]:
        """Return what blocks of `long` instead of `short` add to a round: the quartiles over repeats."""
        pairs = zip(self.turns[short], self.turns[long], strict=True)
        ratios = [getattr(b, part) / getattr(a, part) - 1 for a, b in pairs]
        low, middle, high = (round(float(q), 4) for q in np.percentile(ratios, (25, 50, 75)))
        return {"from": short, "to": long, "share": middle, "low": low, "high": high}

    def _ms(self, gamma: int, part: str) -> float:
        return 1e3 * float(np.median([getattr(turn, part) for turn in self.turns[gamma]]))


def block_lengths(config: DrafterConfig) -> tuple[int, ...]:
    """Return the block lengths that can be measured: a parallel block or a chain of any length; MTP has one."""
    own = config.block_size
    return (own,) if config.kind == "mtp" else tuple(sorted({own, *GAMMAS}))


def measure(
    model: DraftModel,
    target_dir: Path,
    *,
    batch: int = BATCH,
    repeats: int = REPEATS,
    verified: int | None = None,
) -> Latency:
    """Measure rounds of `batch` sampled requests, `verified` draft tokens of each going to the target (default: γ)."""
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    verified = model.config.block_size if verified is None else verified
    lengths = block_lengths(model.config)
    verify = _Verify(
        FrozenTarget(target_dir, (), dtype, CONTEXT_LEN + 1 + verified), batch, verified
    )
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(model, Path(folder))
        with DrafterProcess(Path(folder), target_dir, lengths, dtype) as drafter:
            rounds = _Rounds(drafter, verify, batch, model.config.feature_dim)
            turns = [{gamma: rounds.turn(gamma) for gamma in lengths} for _ in range(repeats + 1)]
    # The first one warms up.
    return Latency(batch, verified, {g: [turn[g] for turn in turns[1:]] for g in lengths})


class _Rounds:
    """Rounds of each block length: every turn commits two tokens a request, asks for a block and verifies."""

    def __init__(
        self, drafter: DrafterProcess, verify: _Verify, batch: int, feature_dim: int
    ) -> None:
        self._drafter, self._verify = drafter, verify
        self._batch, self._feature_dim = batch, feature_dim
        self._names = tuple(f"r{i}" for i in range(batch))
        params = [SamplingParams(noise_key=i) for i in range(batch)]
        self._sampling = SamplingBatch.of(params)
        self._committed: dict[int, int] = {}  # by block length: each has an engine of its own

    def turn(self, gamma: int) -> Turn:
        """Return seconds of one round."""
        if gamma not in self._committed:
            self._committed[gamma] = CONTEXT_LEN
            self._drafter.advance(gamma, self._commits(0, CONTEXT_LEN))
        before = self._committed[gamma]
        self._committed[gamma] = before + 2
        commits = self._commits(before - 1, before + 2)
        started = time.perf_counter()
        drafted = self._drafter.advance(gamma, commits)
        used = time.process_time()
        verify = self._verify.step()
        processor = drafted.processor_s + time.process_time() - used
        whole = time.perf_counter() - started
        return Turn(drafted.proposals.draft_time_s, verify, whole, processor)

    def _commits(self, first: int, committed: int) -> Any:
        rng = np.random.default_rng(committed)
        features = rng.normal(size=(self._batch * (committed - 1 - first), self._feature_dim))
        return trial_commit(
            self._names, first, committed, features.astype(np.float32), self._sampling
        )


class _Verify:
    """Steps of the target over anchors and drafts of a batch, all at the same context length."""

    def __init__(self, target: FrozenTarget, batch: int, verified: int) -> None:
        self._target, self._rows = target, target.new_rows(batch)
        self._ids = torch.ones((batch, 1 + verified), dtype=torch.long)
        self._start = torch.full((batch,), CONTEXT_LEN)

    @torch.inference_mode()
    def step(self) -> float:
        """Return seconds of one step, logits of every token included."""
        started = time.perf_counter()
        seen = self._target.forward(self._ids, self._start, self._rows, 0)
        self._target.head(seen.hidden).float().argmax(-1)
        return time.perf_counter() - started
