"""What a draft costs in the serving engine, for blocks of several lengths, and which share of a round that is.

Drafter and target take turns here, as they do in a round of one cohort. Sizes are measured in turn and the turns
repeated, so that what else the machine does falls on all alike; medians are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.base import DrafterEngine
from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.model import DraftModel
from actors.engine.drafters.protocol import DrafterOptions
from actors.engine.drafters.serve import engine_for
from actors.engine.drafters.trial import trial_commit
from actors.engine.training.frozen_target import FrozenTarget
from configs.machine import multiplies_bfloat16

BATCH = 16
CONTEXT_LEN = 128
GAMMAS = (4, 8, 12, 16)


@dataclass(frozen=True)
class Latency:
    """Medians in milliseconds at one batch size; `verify_ms` of a target step with `1 + verified` tokens a request."""

    batch: int
    draft_ms: dict[int, float]  # by block length
    verify_ms: float
    verified: int
    repeats: int

    def report(self) -> dict[str, Any]:
        """Return for JSON: times, and the share that drafting has in a round at each length."""
        shares = {str(g): round(ms / (ms + self.verify_ms), 4) for g, ms in self.draft_ms.items()}
        found = {
            "batch": self.batch,
            "draft_ms_by_gamma": {str(g): round(ms, 3) for g, ms in self.draft_ms.items()},
            "verify_ms": round(self.verify_ms, 3),
            "verified_a_request": self.verified,
            "draft_share_of_round": shares,
            "repeats": self.repeats,
        }
        if {min(GAMMAS), max(GAMMAS)} <= set(self.draft_ms):
            short, long = (self.verify_ms + self.draft_ms[g] for g in (min(GAMMAS), max(GAMMAS)))
            found["round_growth"] = round(long / short - 1, 4)  # the shortest block to the longest
        return found


def block_lengths(model: DraftModel) -> tuple[int, ...]:
    """Return the block lengths that can be measured: a parallel block or a chain of any length; MTP has one."""
    own = model.config.block_size
    return (own,) if model.config.kind == "mtp" else tuple(sorted({own, *GAMMAS}))


def measure(
    model: DraftModel,
    target_dir: Path,
    *,
    batch: int = BATCH,
    repeats: int = 5,
    verified: int | None = None,
) -> Latency:
    """Measure drafts of `batch` sampled requests, and the target verifying `verified` tokens of each (default: γ)."""
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    verified = model.config.block_size if verified is None else verified
    turns: dict[int, Callable[[], float]] = {
        gamma: _Drafts(_engine(model, gamma, dtype), batch).turn for gamma in block_lengths(model)
    }
    longest = CONTEXT_LEN + 1 + verified
    verify = _Verify(FrozenTarget(target_dir, (), dtype, longest), batch, verified).turn
    took: dict[int, list[float]] = {gamma: [] for gamma in turns}
    verifying = []
    for turn in range(repeats + 1):  # the first one warms up
        for gamma, draft in turns.items():
            seconds = draft()
            if turn:
                took[gamma].append(seconds)
        seconds = verify()
        if turn:
            verifying.append(seconds)
    draft_ms = {gamma: 1e3 * float(np.median(times)) for gamma, times in took.items()}
    return Latency(batch, draft_ms, 1e3 * float(np.median(verifying)), verified, repeats)


def _engine(model: DraftModel, gamma: int, dtype: torch.dtype) -> DrafterEngine:
    """Serve the model with blocks of `gamma`, whatever it was trained with: only their cost is asked for."""
    own = model.config
    model.config = replace(own, block_size=gamma)
    try:
        options = DrafterOptions("measure", dtype=dtype)
        return engine_for(model, ConfidenceTables.identity(gamma), options, "measure")
    finally:
        model.config = own  # the engine has its own copy, with the other length


class _Drafts:
    """Rounds of one engine: every turn commits two tokens a request and asks for a block."""

    def __init__(self, engine: DrafterEngine, batch: int) -> None:
        self._engine, self._batch, self._committed = engine, batch, CONTEXT_LEN
        self._advance(0, CONTEXT_LEN)

    def turn(self) -> float:
        """Return seconds of one draft."""
        self._committed += 2
        return self._advance(self._committed - 3, self._committed)

    def _advance(self, first: int, committed: int) -> float:
        rows = committed - 1 - first
        rng = np.random.default_rng(committed)
        features = rng.normal(size=(self._batch * rows, self._engine.spec.feature_dim))
        names = tuple(f"r{i}" for i in range(self._batch))
        sampling = SamplingBatch.of([SamplingParams(noise_key=i) for i in range(self._batch)])
        message = trial_commit(names, first, committed, features.astype(np.float32), sampling)
        started = time.perf_counter()
        proposal = self._engine.advance(message)
        seconds = time.perf_counter() - started
        assert proposal is not None
        return seconds


class _Verify:
    """Steps of the target over anchors and drafts of a batch, all at the same context length."""

    def __init__(self, target: FrozenTarget, batch: int, verified: int) -> None:
        self._target, self._rows = target, target.new_rows(batch)
        self._ids = torch.ones((batch, 1 + verified), dtype=torch.long)
        self._start = torch.full((batch,), CONTEXT_LEN)

    @torch.inference_mode()
    def turn(self) -> float:
        """Return seconds of one step, logits of every token included."""
        started = time.perf_counter()
        seen = self._target.forward(self._ids, self._start, self._rows, 0)
        self._target.head(seen.hidden).float().argmax(-1)
        return time.perf_counter() - started
