"""What happened in a storm, one event a line: written as it happens, read by the checker. The words stand here.

Every event has `at_s` (seconds since the storm began) and `event`, which is one of:

* `run`: first of all; seed, kinds, what was asked for, settings.
* `expected`: `request`, `token_ids` that an undisturbed cluster gave.
* `open`: `stream`, `request`, `chain` (the client's request; a retry is a new stream of the same chain).
* `tokens`: `stream`, `token_ids` that arrived together.
* `end`: `stream`, `how` (see `Ending`), `detail`, and where it is known `completion_tokens` and `retry_after_s`.
* `fault`: `fault` (its number), `kind`, `victim`; later `recovered` or `unrecovered` with the same number.
* `leak`: `what` was not back at its baseline after the storm.
* `counts`: what proves that the faults had an effect (messages dropped, requests preempted).
* `over`: the last event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TextIO

Event = dict[str, Any]
Ending = Literal[
    "complete",  # [DONE], with usage
    "aborted",  # our client hung up, as it should
    "refused",  # 429 or 503 of the API before anything was streamed
    "broken",  # no connection, or it broke
    "status",  # another status than 200
    "error",  # an error event within the stream
    "cut",  # the response ended in good order, but without [DONE]
]


class History:
    """Appends events to a file, and keeps them.

    Args:
        file: open for writing.
        clock: seconds that only grow.
    """

    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._began = clock()
        self.events: list[Event] = []

    @property
    def now_s(self) -> float:
        return self._clock() - self._began

    def note(self, event: str, **about: Any) -> None:
        """Something happens now."""
        noted = {"at_s": round(self.now_s, 4), "event": event, **about}
        self.events.append(noted)
        self._file.write(json.dumps(noted, separators=(",", ":")) + "\n")
        self._file.flush()


def read_history(path: Path) -> list[Event]:
    """The events of a file. Raises ValueError for one that is no history, naming the line."""
    with path.open(encoding="utf-8") as lines:
        return parse_history(lines)


def parse_history(lines: Iterable[str]) -> list[Event]:
    """Events from their lines.

    Raises:
        ValueError: naming the line that is not an event.
    """
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            events.append({**event, "at_s": float(event["at_s"]), "event": str(event["event"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} is no event of a chaos history: {error}") from error
    return events
