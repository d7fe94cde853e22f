"""What the command says and where: results on stdout, everything else on stderr, one line for a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO


class CommandError(Exception):
    """A failure the user can mend. The message is one line: what is wrong and what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(text: str = "", *, end: str = "\n", to: TextIO | None = None) -> None:
    """A result, for the user or for a pipe (stdout, unless another stream is given)."""
    stream = to or sys.stdout
    stream.write(text + end)
    stream.flush()


def note(text: str = "", *, end: str = "\n") -> None:
    """Progress, logs, live text (stderr)."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def emit_json(value: Mapping[str, Any], to: TextIO | None = None) -> None:
    """The one object of a `--json` run; always the last line of stdout."""
    say(json.dumps(value, ensure_ascii=False), to=to)


def listed(text: str) -> tuple[str, ...]:
    """The words of `A,B,…`."""
    return tuple(word for part in text.split(",") if (word := part.strip()))


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell; numbers (cells that start with a digit) to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(text: str, width: int) -> str:
        return text.rjust(width) if text[:1].isdigit() else text.ljust(width)

    padded = ["  ".join(map(cell, line, widths)).rstrip() for line in lines]
    return "\n".join(padded)
