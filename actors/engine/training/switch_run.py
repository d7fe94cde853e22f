"""`dspark evaluate --switches`: how a rank's calibration follows traffic of changing kind, on held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.core.online_calibration import OnlineCalibration
from actors.engine.drafters.calibration import RULES, ConfidenceTables, read_tables
from actors.engine.training import switches
from actors.engine.training.compare import Scene
from actors.engine.training.evaluate import Replay, replayed
from actors.engine.training.replay import Blocks
from actors.engine.training.slot_law import Rule
from actors.engine.weights import CheckpointError
from configs.calibration import CalibrationConfig
from kernels.markov_sample import DraftSampling

RULE_AT: dict[float, Rule] = {0.0: "greedy", 1.0: "rejection"}
PARTS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}  # of each domain


def measure_switches(
    scene: Scene,
    drafter_dir: Path,
    gamma: int,
    config: CalibrationConfig,
    temperatures: Sequence[float],
    part: str = "all",
    num_known: int | None = None,
) -> dict[str, Any]:
    """Return the report: by rule, of blocks of `gamma` drafted by `drafter_dir` with its own calibration tables.

    `num_known`: see `OnlineCalibration`.
    Raises CheckpointError where there is no held-out text, or of one domain only.
    """
    model = scene.load(drafter_dir).model
    gamma = min(gamma, model.config.block_size)
    head = scene.tables()[1]
    tables = read_tables(drafter_dir, scene.target_dir, model.config.block_size)
    by_rule = {}
    for temperature in temperatures:
        rule = RULE_AT[temperature]
        data = scene.held_out(model.config, temperature, model.config.target_layer_ids)
        every = replayed(model, data, Replay(rule, head), per_domain=scene.limit)
        pools = walks(every, tables.fitting(gamma, torch.device("cpu")), rule, gamma, PARTS[part])
        if len(pools) < 2:
            raise CheckpointError(
                f"{data.root}: whole blocks of {len(pools)} domain(s); switches need two at least"
            )
        by_rule[rule] = switches.measure(
            pools,
            lambda num: OnlineCalibration(
                num, looks_per_alarm=config.looks_per_alarm, num_known=num_known
            ),
        )
    return {"drafter": str(drafter_dir), "gamma": gamma, "answers": part, "switches": by_rule}


def walks(
    every: Sequence[Blocks], tables: ConfidenceTables, rule: Rule, gamma: int, part: slice
) -> Mapping[str, list[switches.Walk]]:
    """Return the rounds of each answer by domain, with the confidences that a drafter with these tables gives."""
    by_domain: dict[str, list[Blocks]] = {}
    for blocks in every:
        by_domain.setdefault(blocks.domain, []).append(blocks)
    found: dict[str, list[switches.Walk]] = {}
    for domain, own in sorted(by_domain.items()):
        for blocks in own[part]:
            rows, accepted = switches.visited(blocks, gamma)
            if rows:
                logits = torch.from_numpy(blocks.confidence_logits[rows][:, :gamma])
                confidences = tables.confidences(logits, _sampling(rule, len(rows))).numpy()
                found.setdefault(domain, []).append(
                    switches.Walk(confidences.astype(np.float32), accepted)
                )
    return found


def _sampling(rule: Rule, count: int) -> DraftSampling:
    ones = torch.ones(count)
    whole = torch.zeros(count, dtype=torch.long)
    greedy = rule == "greedy"
    temperature = ones * (0.0 if greedy else 1.0)
    return DraftSampling(
        temperature, ones, whole, whole, whole + RULES[rule], greedy, rule == "coupled", False
    )
