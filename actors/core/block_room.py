"""KV blocks for requests that grow, and who gives theirs up when there are none left.

A request holds blocks for the tokens it has and is about to compute, not for all it may ever produce: most stop long
before their limit, and reserving for the worst case would leave most of the memory empty. So the pool may run dry. Then
the request that deserves its place least (highest priority number, then latest arrival) is preempted: it gives up its
slot, its blocks and its draft context, keeps its committed tokens, and waits, before all that came after it, until
there is room to compute them again as if they were its prompt (`Request.preempt`). Its stream only pauses: the
committed tokens stay, and the next one is drawn as in a replay on another rank (C8). Whatever of its blocks nobody
needed meanwhile is found again in the prefix cache.

The first in that order is never preempted, and no request is admitted that the whole pool could not hold, so the first
one always goes on: there is no deadlock and no endless exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.core.request import Request
from actors.core.row_table import RowTable


def precedence(request: Request) -> tuple[int, int]:
    """Lower goes first: when places are given, and when blocks are short."""
    return request.admitted.priority, request.arrival


def make_room(table: RowTable, preempt: Callable[[Request], None]) -> None:
    """Give every running request blocks for its anchor and, while any are free, for a whole draft.

    Call it between two steps. Drafts alone preempt nobody: where blocks are short, `RowTable.draft_room` is.
    """
    running = np.flatnonzero(table.is_running)
    ahead = np.clip(table.num_remaining[running] - 1, 0, table.gamma)
    lacks = table.leased_len[running] < table.committed_len[running] + ahead
    if not lacks.any():
        return
    growing = [request for slot in running[lacks] if (request := table.requests[slot]) is not None]
    ahead_of = dict(zip(running[lacks].tolist(), ahead[lacks].tolist(), strict=True))
    for request in sorted(growing, key=precedence):
        if request.slot < 0:
            continue  # preempted for one before it
        if table.extend(request, request.committed_len + ahead_of[request.slot]):
            continue
        while request.slot >= 0 and not table.extend(request, request.committed_len):
            preempt(max(filter(None, table.requests), key=precedence))
