"""`dspark evaluate`: every drafter there is, measured on the same held-out text as the paper measures (spec 6, 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from actors.core.calibration import ConfidenceMap
from actors.engine.drafters.config import DrafterConfig, DSparkConfig
from actors.engine.drafters.model import DraftModel
from actors.engine.training import calibrate
from actors.engine.training.calibrate import NUM_BINS, rounded
from actors.engine.training.dataset import OnPolicyDataset
from actors.engine.training.equal_data import DSPARK, AnswerRounds
from actors.engine.training.evaluate import Replay, acceptance, macro_domains, replayed
from actors.engine.training.replay import Blocks, above_threshold, conditional

THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(10))
RULE_AT = {0.0: "greedy", 1.0: "rejection"}


@dataclass(frozen=True)
class Candidate:
    """A drafter to measure. `steps` and `answer_tokens` say what it was trained on, None where that is not known."""

    name: str
    where: str
    model: DraftModel
    steps: int | None = None
    answer_tokens: int | None = None

    @property
    def trained_on(self) -> tuple[int, int] | None:
        """Steps and answer tokens; None where either is not known."""
        if self.steps is None or self.answer_tokens is None:
            return None
        return self.steps, self.answer_tokens

    def facts(self) -> dict[str, Any]:
        """Return what it is, for JSON."""
        config = self.model.config
        return {
            "drafter": self.where,
            "kind": config.kind,
            "head": config.markov_head_type if isinstance(config, DSparkConfig) and config.markov_rank else None,
            "gamma": config.block_size,
            "num_layers": config.num_hidden_layers,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.steps,
            "answer_tokens": self.answer_tokens,
            "confidence": "head" if has_head(self.model) else "peak",
        }  # fmt: skip


def name_of(config: DrafterConfig) -> str:
    """Return what reports call a drafter of this kind and head."""
    if isinstance(config, DSparkConfig) and config.markov_rank:
        return (
            "dspark"
            if config.markov_head_type == "vanilla"
            else f"dspark_{config.markov_head_type}"
        )
    return "mtp1" if config.kind == "mtp" else config.kind


def has_head(model: DraftModel) -> bool:
    """Return whether the drafter says itself how sure it is."""
    return isinstance(model.config, DSparkConfig) and model.config.enable_confidence_head


def measure(
    candidate: Candidate,
    data: OnPolicyDataset,
    temperature: float,
    target_head: Tensor,
    per_domain: int | None = None,
) -> tuple[dict[str, Any], AnswerRounds]:
    """Return everything measured of one drafter at one temperature, and what it made of each answer.

    Raises ValueError when `data` has no text of this temperature.
    """
    rule = RULE_AT[temperature]
    replay = Replay(rule=rule, head=target_head)  # type: ignore[arg-type]
    every = replayed(candidate.model, data, replay, per_domain=per_domain)
    if len(every) < 2:
        raise ValueError(f"{data.root}: fewer than two answers at temperature {temperature:g}")
    found = {"temperature": temperature, "rule": rule, "num_answers": len(every), **summary(every)}
    return found, AnswerRounds.of(every)


def summary(every: Sequence[Blocks]) -> dict[str, Any]:
    """Return acceptance, calibration and the threshold sweep of some answers' blocks.

    Mean values are over the macro domains, each counting alike. Calibration errors are of answers that were not fitted.
    """
    gamma = every[0].accept.shape[1]
    tallies = acceptance(every, gamma)
    chosen = macro_domains(sorted(tallies))
    survival = np.mean([tallies[d].survival for d in chosen], axis=0)
    found = calibrate.calibrated(every)
    accepted, after = found.accepted, found.unseen
    raw = ConfidenceMap.identity(gamma).apply(found.logits)
    return {
        "acceptance_length": round(float(np.mean([tallies[d].length for d in chosen])), 4),
        "macro_over": chosen,
        "by_domain": {d: round(t.length, 4) for d, t in sorted(tallies.items())},
        "survival": rounded(survival),
        "conditional": rounded(conditional(survival)),
        "survival_by_domain": {d: rounded(t.survival) for d, t in sorted(tallies.items())},
        "conditional_by_domain": {d: rounded(t.conditional) for d, t in sorted(tallies.items())},
        "rounds": round(sum(t.rounds for t in tallies.values()), 1),
        "ece_raw": rounded(found.raw),
        "ece_calibrated": rounded(found.calibrated),
        "ece_floor": rounded(found.floor),
        "ece_floor_answers": rounded(found.floor_of_answers),
        "ece_by_domain": {d: rounded(errors) for d, errors in found.by_domain.items()},
        "discrimination_raw": calibrate.discrimination(raw, accepted),
        "discrimination_calibrated": calibrate.discrimination(after, accepted),
        "reliability_raw": reliability(raw, accepted),
        "reliability_calibrated": reliability(after, accepted),
        "threshold_sweep": sweep(every, found.map, chosen),
    }


def sweep(
    every: Sequence[Blocks], confidence_map: ConfidenceMap, domains: Sequence[str]
) -> list[dict[str, Any]]:
    """Return acceptance length against verified tokens for thresholds on the calibrated confidence, by domain."""
    rows = []
    for threshold in THRESHOLDS:
        by_domain = {}
        for domain in domains:
            own = [blocks for blocks in every if blocks.domain == domain]
            maps = [confidence_map.apply(blocks.confidence_logits) for blocks in own]
            kept = above_threshold(own, maps, threshold)
            by_domain[domain] = {
                "acceptance_length": round(kept.length, 4),
                "verified": round(kept.verified, 4),
            }
        means = {
            name: round(float(np.mean([d[name] for d in by_domain.values()])), 4)
            for name in ("acceptance_length", "verified")
        }
        rows.append({"threshold": threshold, **means, "by_domain": by_domain})
    return rows


def reliability(
    confidences: npt.NDArray[np.floating], accepted: npt.NDArray[np.int64]
) -> list[dict[str, list[float]]]:
    """Return for each position, by bin of the survival: mean forecast, share that survived, rounds."""
    survival = confidences.astype(np.float64).cumprod(axis=1)
    curves = []
    for k in range(survival.shape[1]):
        bins = np.minimum((survival[:, k] * NUM_BINS).astype(int), NUM_BINS - 1)
        counts = np.bincount(bins, minlength=NUM_BINS)
        used = counts > 0
        sums = [
            np.bincount(bins, weights, NUM_BINS)[used] / counts[used]
            for weights in (survival[:, k], accepted > k)
        ]
        curves.append(
            {
                "forecast": rounded(sums[0]),
                "survived": rounded(sums[1]),
                "rounds": [float(c) for c in counts[used]],
            }
        )
    return curves


def depth(
    named: Mapping[str, str], layers: Mapping[str, int], lengths: Mapping[str, float]
) -> dict[str, Any] | None:
    """Compare DSpark with DFlash drafters that have more layers; None where there is none.

    Args:
        named: drafters trained alike, by what they are called there; gives the name in the report.
        layers, lengths: by name in the report.
    """
    entries = {n: own for n, own in named.items() if n == DSPARK or n.startswith("dflash")}
    if DSPARK not in entries or len(entries) < 2:
        return None
    fewest = layers[entries[DSPARK]]
    found = {
        name: {"num_layers": layers[own], "acceptance_length": lengths[own]}
        for name, own in entries.items()
        if name == DSPARK or layers[own] > fewest
    }
    return found if len(found) > 1 else None
