"""`dspark drain` and `undrain`: a rank gets no new streams, or gets them again."""

from __future__ import annotations

import argparse

from cluster.commands import reach, remote
from cluster.console import emit_json, say
from cluster.launcher_file import LauncherFile


def drain(arguments: argparse.Namespace) -> int:
    """Send nothing new to a rank."""
    return _drain(arguments, is_drained=True)


def undrain(arguments: argparse.Namespace) -> int:
    """Send streams there again."""
    return _drain(arguments, is_drained=False)


def _drain(arguments: argparse.Namespace, *, is_drained: bool) -> int:
    word = "drain" if is_drained else "undrain"
    if arguments.cluster and remote.is_launcher_file(arguments.cluster):
        file = LauncherFile.read(arguments.cluster)
        report = file.on_head(word, arguments.member, "--cluster", "auto")
    else:
        report = reach.at(
            arguments,
            lambda found: {"members": reach.ask(found, "drain", arguments.member, is_drained)},
        )
    if arguments.json:
        emit_json(report)
    else:
        what = "take no new streams" if is_drained else "take streams again"
        say(f"{' and '.join(report['members'])}: {what}")
    return 0
