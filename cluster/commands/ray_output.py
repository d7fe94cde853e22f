"""What Ray prints into our process, kept apart from results and from what only looks like trouble."""

from __future__ import annotations

import io
from typing import TextIO

# At every end of a Serve application Ray reports that calls to its own controller will be retried for ever.
HARMLESS = ("Task ServeController.", "killed by `ray.kill`")


class RayOutput(io.TextIOBase):
    """A stream to stand in for stdout: whole lines go on to `sink`, without the harmless ones."""

    def __init__(self, sink: TextIO) -> None:
        self._sink = sink
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if not all(part in line for part in HARMLESS):
                self._sink.write(line + "\n")
        self._sink.flush()
        return len(text)
