"""The options of `dspark simulate`. Light: the simulator itself is imported when it runs (`cluster.simulate`)."""

from __future__ import annotations

import argparse
from pathlib import Path

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "presets" / "simulate"
DEFAULT_PRESET = "v4-flash"
DEFAULT_OUT = "simulations"


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        default=DEFAULT_PRESET,
        metavar="PRESET|FILE",
        help=f"{', '.join(preset_names())}, or a YAML file (default {DEFAULT_PRESET})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one entry of the preset, such as measure.steps=50; may be repeated",
    )
    parser.add_argument("--seed", type=int, help="of every random number (default: the preset's)")
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help="folder for plots and rows; '' writes nothing (default %(default)s)",
    )
