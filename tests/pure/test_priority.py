"""Who starts first when places are few."""

from __future__ import annotations

from dataclasses import replace

from tests.pure.rank_harness import Session, admitted, make_rank


def test_of_those_that_wait_the_lowest_priority_number_starts_first() -> None:
    session = Session(make_rank(max_running=1), error=0.0)
    session.submit(admitted("first", [1], 5))
    session.step()
    for name, priority in (("late", 5), ("plain", 0), ("urgent", -3), ("plain too", 0)):
        session.submit(replace(admitted(name, [2], 5), priority=priority))
    order = ["first"]
    for _ in range(200):
        if session.step() is None and session.rank.is_idle:
            break
        running = [r.request_id for r in session.rank.book.table.requests if r is not None]
        order += [name for name in running if name not in order]
    assert order == ["first", "urgent", "plain", "plain too", "late"]
