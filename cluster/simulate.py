"""`dspark simulate`: what a policy is worth on a cluster that is not there, by the decisions that serve."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from cluster.console import emit_json, note, say
from cluster.simulation import tables
from cluster.simulation.experiments import Report, num_steps, run
from cluster.simulation.scenario import Scenario, load


def simulate(arguments: argparse.Namespace) -> int:
    scenario = load(arguments.preset, arguments.set)
    if arguments.seed is not None:
        scenario = scenario.model_copy(update={"seed": arguments.seed})
    note(scenario.title)
    report = _run(scenario)
    files = _write(report, Path(arguments.out)) if arguments.out else []
    say(tables.text(report))
    for path in files:
        note(f"written: {path}")
    if arguments.json:
        emit_json({**report.as_json(), "files": [str(path) for path in files]})
    return 0


def _run(scenario: Scenario) -> Report:
    # Redrawn in place on a terminal; in a log every redraw is a line.
    every_s = 0.2 if sys.stderr.isatty() else 15.0
    with tqdm(total=num_steps(scenario), unit="step", leave=False, mininterval=every_s) as bar:

        def progress(steps: int) -> None:
            bar.update(steps)

        return run(scenario, progress)


def _write(report: Report, out: Path) -> list[Path]:
    folder = out / report.scenario.name
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.csv"
    rows.write_text(tables.csv_text(report), encoding="utf-8")
    written = [rows]
    try:
        from cluster.simulation import figures  # matplotlib: an optional dependency
    except ImportError:
        note("no plots: install the extra `plots` (matplotlib)")
        return written
    return written + figures.draw(report, folder)
