"""`dspark calibrate`: replay held-out text under each acceptance rule, fit, write, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.core.calibration import ConfidenceMap
from actors.engine.drafters.calibration import CALIBRATION_FILE
from actors.engine.training.calibrate import calibrate_drafter
from actors.engine.training.compare import Scene
from actors.engine.training.evaluate import Replay, replayed
from actors.engine.training.evaluation import has_head, reliability
from actors.engine.training.replay import Blocks
from actors.engine.training.slot_law import Rule
from actors.engine.weights import CheckpointError

RULES_AT: dict[float, tuple[Rule, ...]] = {0.0: ("greedy",), 1.0: ("rejection", "coupled")}


def calibrate(scene: Scene, drafter_dir: Path, temperatures: Sequence[float]) -> dict[str, Any]:
    """Write the drafter's `calibration.json`: a table for each rule at these temperatures.

    Raises CheckpointError for a drafter without a confidence head, or without held-out text to fit on.
    """
    model = scene.load(drafter_dir).model
    if not has_head(model):
        raise CheckpointError(
            f"{drafter_dir} has no confidence head: its confidences are learned while it serves"
        )
    head = scene.tables()[1]
    by_rule: dict[tuple[str, float], Sequence[Blocks]] = {}
    for temperature in temperatures:
        data = scene.held_out(model.config, temperature, model.config.target_layer_ids)
        for rule in RULES_AT[temperature]:
            every = replayed(model, data, Replay(rule, head), per_domain=scene.limit)
            if len(every) < 2:
                raise CheckpointError(
                    f"{data.root}: fewer than two answers at temperature {temperature:g}"
                )
            by_rule[rule, temperature] = every
    found = calibrate_drafter(drafter_dir, scene.target_dir, by_rule)
    tables = {}
    for name, temperature in by_rule:
        own = found[name]
        raw = ConfidenceMap.identity(own.logits.shape[1]).apply(own.logits)
        tables[name] = {
            "temperature": temperature,
            **own.measured(),
            "shifts": np.round(own.map.shifts, 3).tolist(),
            "temperatures": np.round(own.map.temperatures, 3).tolist(),
            "knots": np.round(own.map.knots, 3).tolist(),
            "bends": np.round(own.map.bends, 3).tolist(),
            "reliability_raw": reliability(raw, own.accepted),
            "reliability_calibrated": reliability(own.unseen, own.accepted),
        }
    return {"path": str(drafter_dir / CALIBRATION_FILE), "tables": tables}
