"""`dspark evaluate` and `dspark calibrate`: drafters measured on held-out text, and their confidences made true."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cluster.commands import switches
from cluster.console import CommandError, emit_json, note, say, table
from cluster.placement import OMP_SPIN_COUNT
from configs.load import load

TEMPERATURES = {"0": (0.0,), "1": (1.0,), "both": (0.0, 1.0)}


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dspark evaluate`."""
    _add_common(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="one drafter more, under this name in the report; may be repeated",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="of the drafters there are, measure this one; may be repeated (default: all)",
    )
    parser.add_argument("--no-latency", action="store_true", help="leave out what drafts cost")
    parser.add_argument("--out", metavar="DIR", help="folder for evaluation.json and the plots")
    parser.add_argument(
        "--switches",
        choices=("all", "even", "odd"),
        nargs="?",
        const="all",
        help="instead: how the configured drafter's confidences follow traffic that changes its domain; "
        "even, odd: of each domain every second answer",
    )


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `dspark calibrate`."""
    _add_common(parser)
    parser.add_argument(
        "--drafter", metavar="DIR", help="drafter directory (default: model.drafter)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the reliability plots")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=int, metavar="N", help="held-out answers of each domain (default: all)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="W", help="folder of training runs and of their held-out text"
    )
    parser.add_argument(
        "--temperature",
        choices=TEMPERATURES,
        default="both",
        help="default: both, where there is text",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")


def evaluate(arguments: argparse.Namespace) -> int:
    """Measure every drafter there is."""
    if arguments.switches:
        scene = _scene(arguments)
        found = switches.measure(arguments, scene, _temperatures(arguments, scene))
        emit_json(found) if arguments.json else say(switches.text(found))
        return 0
    named = [_named(text) for text in arguments.drafter]
    scene = _scene(arguments)
    from actors.engine.training import compare
    from actors.engine.weights import CheckpointError

    try:
        candidates = _chosen(scene.candidates(named), arguments.only)
        if scene.lacks_compared:
            note("the drafters trained alike for comparison ship with the repository, not here")
        if not candidates:
            raise CommandError(
                "there is no drafter to measure; name one with --drafter NAME=DIR", 2
            )
        report: dict[str, Any] = {
            "model": _model_path(arguments),
            **compare.compare(
                scene,
                candidates,
                _temperatures(arguments, scene),
                with_latency=not arguments.no_latency,
                progress=note,
            ),
        }
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error
    if arguments.out:
        out = Path(arguments.out)
        note(f"written: {compare.write_report(report, out)}")
        _draw("evaluation", report, out)
    if arguments.json:
        emit_json(report)
    else:
        say(text(report))
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    """Fit and write `calibration.json` of one drafter."""
    config = load(arguments.config, arguments.set)
    scene = _scene(arguments)
    from actors.engine.training.calibration_run import calibrate as run
    from actors.engine.weights import CheckpointError

    try:
        folder = switches.drafter_folder(config, arguments.drafter)
        report = run(scene, folder, _temperatures(arguments, scene))
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error
    if arguments.out:
        _draw("calibration", report, Path(arguments.out))
    if arguments.json:
        emit_json(report)
    else:
        rows = [
            [rule, f"{entry['num_rounds']}", *(" ".join(_percent(entry[key])) for key in _ERRORS)]
            for rule, entry in report["tables"].items()
        ]
        header = [
            "rule",
            "rounds",
            "ECE % before",
            "after, unseen answers",
            "noise floor",
            "of answers",
        ]
        say(f"written: {report['path']}\n{table(header, rows)}")
    return 0


_ERRORS = ("ece_raw", "ece_unseen", "ece_floor", "ece_floor_answers")


def _model_path(arguments: argparse.Namespace) -> str:
    """The target's name."""
    return load(arguments.config, arguments.set).model.path


def _scene(arguments: argparse.Namespace) -> Any:
    if arguments.limit is not None and arguments.limit < 1:
        raise CommandError(f"--limit {arguments.limit}: use at least 1", exit_code=2)
    model = _model_path(arguments)
    # Before torch starts its threads: drafter and target take turns in two processes, as a cluster's do.
    os.environ.setdefault("GOMP_SPINCOUNT", str(OMP_SPIN_COUNT))
    import torch  # heavy: only when it is needed

    from actors.engine.training.compare import Scene
    from actors.engine.weights import CheckpointError

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        return Scene.of(model, arguments.work, arguments.limit)
    except CheckpointError as error:
        raise CommandError(str(error)) from error


def _temperatures(arguments: argparse.Namespace, scene: Any) -> tuple[float, ...]:
    """What was asked for; of both, those there is text for."""
    asked = TEMPERATURES[arguments.temperature]
    there = tuple(at for at in asked if scene.has_text(at))
    if len(asked) == 1 or not there:
        return asked
    for at in set(asked) - set(there):
        note(f"no held-out text at temperature {at:g}: it is left out")
    return there


def _chosen(candidates: list[Any], names: list[str]) -> list[Any]:
    """The candidates with these names; all without names."""
    there = [candidate.name for candidate in candidates]
    for name in names:
        if name not in there:
            raise CommandError(f"--only {name}: there is {', '.join(there) or 'no drafter'}", 2)
    return [c for c in candidates if not names or c.name in names]


def _named(text: str) -> tuple[str, Path]:
    name, found, folder = text.partition("=")
    if not (name and found and folder):
        raise CommandError(f"--drafter {text!r}: write NAME=DIR", exit_code=2)
    return name, Path(folder).expanduser()


def _draw(kind: str, report: dict[str, Any], out: Path) -> None:
    try:
        from cluster import evaluation_figures as figures  # matplotlib: an optional dependency
    except ImportError:
        note("no plots: install the extra `plots` (matplotlib)")
        return
    out.mkdir(parents=True, exist_ok=True)
    draw = figures.draw_evaluation if kind == "evaluation" else figures.draw_calibration
    for path in draw(report, out):
        note(f"written: {path}")


def text(report: dict[str, Any]) -> str:
    """The tables of `dspark evaluate`, one a temperature."""
    parts = []
    for at in (0, 1):
        entries = {
            n: e[f"temperature_{at}"]
            for n, e in report["drafters"].items()
            if f"temperature_{at}" in e
        }
        if not entries:
            continue
        domains = sorted({d for e in entries.values() for d in e["by_domain"]})
        header = [
            "drafter",
            "γ",
            "macro",
            *domains,
            "survival %",
            "conditional %",
            "ECE % raw",
            "calibrated",
            "floor",
            "draft ms",
        ]
        rows = [
            _row(name, entry, report["drafters"][name], domains) for name, entry in entries.items()
        ]
        over = ", ".join(next(iter(entries.values()))["macro_over"])
        parts.append(
            f"temperature {at}: acceptance length (macro over {over})\n{table(header, rows)}"
        )
    if report["equal_data"]:
        parts.append(_equal_data(report["equal_data"]))
    return "\n\n".join(parts)


def _equal_data(found: dict[str, Any]) -> str:
    """The ratios of the drafters trained alike, one row a pair."""
    temperatures = [at for at in ("temperature_0", "temperature_1") if at in found]
    rows = [
        [pair, *(_ratio(r) for r in ratios)]
        for pair in found[temperatures[0]]
        for ratios in [[found[at][pair] for at in temperatures]]
    ]
    header = ["acceptance length", *(at.replace("_", " ") for at in temperatures)]
    trained = f"{found['answer_tokens']} tokens and {found['steps']} steps each"
    return f"trained alike, {trained}; in brackets 95 % of resampled answers\n{table(header, rows)}"


def _ratio(found: dict[str, Any]) -> str:
    """With its interval, where the answers allow one."""
    shown = f"{found['ratio']:.3f}"
    return shown if found["low"] is None else f"{shown} ({found['low']:.3f} to {found['high']:.3f})"


def _row(name: str, entry: dict[str, Any], facts: dict[str, Any], domains: list[str]) -> list[str]:
    lengths = [f"{entry['by_domain'][d]:.2f}" if d in entry["by_domain"] else "-" for d in domains]
    keys = ("survival", "conditional", "ece_raw", "ece_calibrated", "ece_floor")
    digits = (0, 0, 1, 1, 1)
    series = [" ".join(_percent(entry[k], n)) for k, n in zip(keys, digits, strict=True)]
    draft_ms = "-" if facts["draft_ms"] is None else f"{facts['draft_ms']:.1f}"
    return [
        name,
        str(facts["gamma"]),
        f"{entry['acceptance_length']:.3f}",
        *lengths,
        *series,
        draft_ms,
    ]


def _percent(values: list[float], digits: int = 1) -> list[str]:
    return [f"{100 * v:.{digits}f}" for v in values]
