"""`dspark evaluate --switches`: how confidences follow traffic that changes from one domain to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.console import CommandError, table
from configs.load import load
from configs.schema import ClusterConfig


def drafter_folder(config: ClusterConfig, named: str | None = None) -> Path:
    """The directory of the drafter that is named or configured; CommandError for one without weights."""
    from actors.engine.drafters.serve import find_drafter

    folder = find_drafter(config.model.path, named or config.model.drafter)
    if folder is None:
        raise CommandError(
            f"model.drafter={config.model.drafter!r} has no weights; name one with --drafter DIR", 2
        )
    return folder


def measure(
    arguments: argparse.Namespace, scene: Any, temperatures: Sequence[float]
) -> dict[str, Any]:
    """Simulate the switches on the `Scene`'s held-out text."""
    from actors.core.draft_stop import LEAST_DRAFTED
    from actors.engine.training.switch_run import measure_switches
    from actors.engine.weights import CheckpointError

    config = load(arguments.config, arguments.set)
    try:
        return measure_switches(
            scene,
            drafter_folder(config),
            config.drafter.gamma,
            config.calibration,
            temperatures,
            arguments.switches,
            LEAST_DRAFTED if config.drafter.stop_share else None,
        )
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error


def text(report: dict[str, Any]) -> str:
    """One table for each acceptance rule."""
    return "\n\n".join(_rule(rule, found) for rule, found in report["switches"].items())


def _rule(rule: str, found: dict[str, Any]) -> str:
    total = found["num_switches"]
    rows = [
        [
            f"{step}",
            _percent(found["error"][i]),
            f"{100 * found['error_worst'][i]:.1f}",
            f"{found['under_limit'][i]} of {total}",
            _percent(found["error_raw"][i]),
            f"{found['under_limit_raw'][i]} of {total}",
            f"{found['alarms_of_miscalibrated'][i]} of {found['miscalibrated']}",
            f"{found['alarms_of_others'][i]} of {total - found['miscalibrated']}",
        ]
        for i, step in enumerate(found["steps"])
    ]
    header = [
        "steps",
        "error % by slot",
        "worst",
        "all slots < 3 %",
        "with label noise",
        "all slots < 3 %",
        "alarm where miscalibrated",
        "elsewhere",
    ]
    alarms, steps = found["steady_alarms"], found["steady_steps"]
    return (
        f"{rule}, {total} switches: calibration error of the new domain, steps of 8 streams after the switch\n"
        f"{table(header, rows)}\n"
        f"exact forecasts would show, with label noise, {_percent(found['floor'])} %; "
        f"steady traffic: {alarms} alarms in {steps} steps"
    )


def _percent(values: list[float]) -> str:
    return " ".join(f"{100 * v:.1f}" for v in values)
