"""`dspark export`: a drafter in the format of another engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.console import CommandError, emit_json, say
from configs.load import load

FORMATS = ("deepspec", "speculators")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", required=True, choices=FORMATS, help="who shall load it")
    parser.add_argument(
        "--drafter", metavar="DIR", help="drafter directory (default: model.drafter)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write")


def export(arguments: argparse.Namespace) -> int:
    """Write config.json and model.safetensors for the target that `model.path` names."""
    config = load(arguments.config, arguments.set)
    from actors.engine.checkpoint import find_model  # imports torch: only when it is needed
    from actors.engine.drafters.export import export as write
    from actors.engine.drafters.serve import find_drafter
    from actors.engine.weights import CheckpointError

    try:
        folder = find_drafter(config.model.path, arguments.drafter or config.model.drafter)
        if folder is None:
            raise CommandError(
                f"model.drafter={config.model.drafter!r} has no weights; name one with --drafter DIR",
                exit_code=2,
            )
        target = find_model(config.model.path)
        written = write(folder, target, arguments.format, Path(arguments.out))
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        emit_json(written)
    else:
        size = written["bytes"] / 1e6
        say(f"{written['kind']} drafter as {written['format']}: {written['out']} ({size:.1f} MB)")
    return 0
