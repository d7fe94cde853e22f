"""When a storm calls a part well again: not before it is, and not kept waiting by what other faults have hit."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.chaos.view import ClusterView


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid


def view(states: dict[str, str], *, pid: int = 2, is_settled: bool = True) -> Any:
    """Of a cluster as it was seen at 10 s, with a supervisor in process `pid`."""
    found: Any = object.__new__(ClusterView)
    found._looked_at, found._is_settled = 10.0, is_settled
    found._members = {n: {"name": n, "state": state, "pid": 7} for n, state in states.items()}
    found._ours = {pid: (Process(pid), "ray::Supervisor")}
    return found


ALL_READY = {"target-0": "ready", "drafter-0": "ready"}


async def test_a_supervisor_is_well_when_it_has_found_everybody() -> None:
    assert await view(ALL_READY).is_well("supervisor", 9.0, {1})
    assert not await view(ALL_READY).is_well("supervisor", 11.0, {1}), "what was seen is older"
    assert not await view(ALL_READY).is_well("supervisor", 9.0, {2}), "it is the old process"
    assert not await view(ALL_READY, is_settled=False).is_well("supervisor", 9.0, {1})


@pytest.mark.parametrize("is_settled", [True, False])
async def test_a_supervisor_is_not_unwell_because_another_fault_has_hit_a_rank(
    is_settled: bool,
) -> None:
    seen = view(ALL_READY | {"target-0": "starting"}, is_settled=is_settled)
    assert await seen.is_well("supervisor", 9.0, {1}, {"supervisor", "target-0"})
    assert not await seen.is_well("supervisor", 9.0, {1}, {"supervisor", "drafter-0"})
    assert not await seen.is_well("supervisor", 9.0, {1}, {"supervisor"})


async def test_a_member_is_well_in_a_new_process_once_all_follow_the_newest_order() -> None:
    assert await view(ALL_READY).is_well("target-0", 9.0, {6}, {"target-0", "drafter-0"})
    assert not await view(ALL_READY).is_well("target-0", 9.0, {7})
    unsettled = view(ALL_READY, is_settled=False)
    assert not await unsettled.is_well("target-0", 9.0, {6}, {"target-0", "drafter-0"})
