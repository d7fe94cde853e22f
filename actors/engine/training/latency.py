"""What a round costs for blocks of several lengths, and which share of it drafting has.

The drafter computes in a process of its own, as it is served, and takes turns with the target, as they do there: a
round is commits to the drafter, its blocks back, one step of the target. What is verified stays the same, as a budget
would have it; only the block gets longer. Lengths are measured in turn and the turns repeated, so that what else the
machine does falls on all alike; medians are reported, of growth that of each repeat's own ratio. On a machine that
others use, processor time tells more than the clock.

Where a block stops follows from confidences (`actors.core.draft_stop`), so rounds with a price are measured on recorded
text: the drafter's own confidences, calibrated, of real contexts.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engine.drafters.calibration import ConfidenceTables
from actors.engine.drafters.checkpoint import save_drafter
from actors.engine.drafters.config import DrafterConfig
from actors.engine.drafters.dspark import DSparkModel
from actors.engine.drafters.heads import MarkovHead
from actors.engine.drafters.model import DraftModel
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.drafter_process import DrafterProcess
from actors.engine.training.frozen_target import FrozenTarget
from actors.engine.training.recorded_requests import RecordedRequests
from configs.machine import multiplies_bfloat16
from configs.schema import DrafterConfig as DrafterSettings

BATCH = 16
CONTEXT_LEN = 128
GAMMAS = (4, 8, 12, 16)
REPEATS = 8
PRICES = (
    0.03,
    0.1,
    0.3,
)  # lowest survivals worth verifying: of an idle rank, and of ever busier ones
STOP_SHARE = DrafterSettings().stop_share
Key = tuple[int, float]  # block length, and the price it may stop by; 0: whole blocks


@dataclass(frozen=True)
class Turn:
    """Seconds of one round."""

    draft: float  # in the drafter's engine
    verify: float  # the target's step
    whole: float  # both, and what goes between the processes
    processor: float  # of both, over all threads: what another process takes does not enter
    drafted: float = float("nan")  # slots of a block, in the mean over requests


@dataclass(frozen=True)
class Latency:
    """Rounds of `batch` requests by block length, in the order they were measured; the target verifies `verified`."""

    batch: int
    verified: int
    turns: dict[int, list[Turn]]
    stopping: dict[float, dict[int, list[Turn]]] = field(default_factory=dict)  # by price
    is_recorded: bool = False  # text; else noise

    def report(self) -> dict[str, Any]:
        """Return for JSON: medians in milliseconds, drafting's share of a round, and what a longer block adds to it."""
        verify = 1e3 * float(np.median([t.verify for own in self.turns.values() for t in own]))
        found = {
            "batch": self.batch,
            "verified_a_request": self.verified,
            "repeats": len(next(iter(self.turns.values()))),
            "text": "recorded" if self.is_recorded else "noise",
            "verify_ms": round(verify, 3),
            **_rounds(self.turns),
        }
        if self.stopping:
            found["stop_share"] = STOP_SHARE
            found["by_price"] = {
                f"{price:g}": {
                    "drafted_by_gamma": {
                        str(g): round(float(np.mean([t.drafted for t in own])), 2)
                        for g, own in turns.items()
                    },
                    **_rounds(turns),
                    # Of what the same block costs whole.
                    "round_ratio_to_whole": {
                        str(g): round(1 + growth(self.turns[g], own, "whole")["share"], 4)
                        for g, own in turns.items()
                    },
                }
                for price, turns in self.stopping.items()
            }
        return found


def _rounds(turns: dict[int, list[Turn]]) -> dict[str, Any]:
    """Medians by block length, and what the longest adds to the shortest."""
    draft, whole = ({g: _ms(own, part) for g, own in turns.items()} for part in ("draft", "whole"))
    found: dict[str, Any] = {
        "draft_ms_by_gamma": {str(g): round(ms, 3) for g, ms in draft.items()},
        "round_ms_by_gamma": {str(g): round(ms, 3) for g, ms in whole.items()},
        "draft_share_of_round": {str(g): round(draft[g] / whole[g], 4) for g in turns},
    }
    short, long = min(GAMMAS), max(GAMMAS)
    if {short, long} <= set(turns):
        for name, part in (("round_growth", "whole"), ("processor_time_growth", "processor")):
            ends = {"from": short, "to": long}
            found[name] = {**ends, **growth(turns[short], turns[long], part)}
    return found


def growth(short: list[Turn], long: list[Turn], part: str) -> dict[str, float]:
    """Return what the `long` turns add to the `short` ones: the quartiles over repeats."""
    pairs = zip(short, long, strict=True)
    ratios = [getattr(b, part) / getattr(a, part) - 1 for a, b in pairs]
    low, middle, high = (round(float(q), 4) for q in np.percentile(ratios, (25, 50, 75)))
    return {"share": middle, "low": low, "high": high}


def _ms(turns: list[Turn], part: str) -> float:
    return 1e3 * float(np.median([getattr(turn, part) for turn in turns]))


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
    text: OnPolicyDataset | None = None,
    tables: ConfidenceTables | None = None,
) -> Latency:
    """Measure rounds of `batch` sampled requests, `verified` draft tokens of each going to the target (default: γ).

    With `text`, rounds whose blocks stop are measured too, where the drafter can stop; `tables` calibrate it.
    """
    dtype = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    verified = model.config.block_size if verified is None else verified
    lengths = block_lengths(model.config)
    sizes = batch, CONTEXT_LEN, repeats + 1
    requests = None if text is None else RecordedRequests.of(text, *sizes)
    prices = PRICES if requests is not None and _can_stop(model) else ()
    if requests is None:
        requests = RecordedRequests.noise(model.config.feature_dim, *sizes)
    few = sorted({min(lengths), model.config.block_size, max(lengths)})
    keys: list[Key] = [(g, 0.0) for g in lengths] + [(g, price) for price in prices for g in few]
    verify = _Verify(
        FrozenTarget(target_dir, (), dtype, CONTEXT_LEN + 1 + verified), batch, verified
    )
    with tempfile.TemporaryDirectory() as folder:
        save_drafter(model, Path(folder))
        with DrafterProcess(Path(folder), target_dir, lengths, dtype, tables) as drafter:
            rounds = _Rounds(drafter, verify, requests)
            turns = [{key: rounds.turn(key) for key in keys} for _ in range(repeats + 1)]

    def of(price: float) -> dict[int, list[Turn]]:
        # The first turn warms up.
        return {g: [turn[g, at] for turn in turns[1:]] for g, at in keys if at == price}

    stopping = {price: of(price) for price in prices}
    return Latency(batch, verified, of(0.0), stopping, requests.is_recorded)


def _can_stop(model: DraftModel) -> bool:
    """See `BlockDrafter.can_stop`."""
    return (
        isinstance(model, DSparkModel)
        and model.confidence_head is not None
        and (model.markov_head is None or type(model.markov_head) is MarkovHead)
    )


class _Rounds:
    """Rounds of each kind: every turn commits two tokens a request, asks for a block and verifies."""

    def __init__(
        self, drafter: DrafterProcess, verify: _Verify, requests: RecordedRequests
    ) -> None:
        self._drafter, self._verify, self._requests = drafter, verify, requests
        self._turns: dict[Key, int] = {}  # that are over; each kind has contexts of its own

    def turn(self, key: Key) -> Turn:
        """Return seconds of one round."""
        gamma, price = key
        if key not in self._turns:
            self._turns[key] = 0
            self._drafter.advance(gamma, self._requests.commits(f"{price}", 0, 0.0))
        self._turns[key] += 1
        commits = self._requests.commits(f"{price}", self._turns[key], STOP_SHARE * price)
        started = time.perf_counter()
        drafted = self._drafter.advance(gamma, commits)
        used = time.process_time()
        verify = self._verify.step()
        processor = drafted.processor_s + time.process_time() - used
        whole = time.perf_counter() - started
        lens = drafted.proposals.draft_lens
        mean_len = float(gamma if lens is None else lens.mean())
        return Turn(drafted.proposals.draft_time_s, verify, whole, processor, mean_len)


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
