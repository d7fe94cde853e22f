"""What a rollout, or a drain, finds when it begins: who must start again, and who would be left."""

from __future__ import annotations

from typing import Any

import pytest

from actors.core.rollout_plan import Bounds
from cluster.autoscaler import AutoscaleDesk
from cluster.rollout import RolloutDesk, RolloutError, Wish
from cluster.routing import RouteBook
from configs.schema import ClusterConfig
from tests.pure import test_routing
from tests.pure.test_routing import describe

book = test_routing.book


def desk_over(book: RouteBook) -> RolloutDesk:
    async def nothing(*_: Any) -> None:
        pass

    return RolloutDesk(book, (), nothing, lambda _name: None, nothing)


async def test_a_rank_that_was_assigned_settings_and_never_restarted_for_them_is_due_again(
    book: RouteBook,
) -> None:
    config = ClusterConfig.model_validate({"target": {"max_running": 7}})
    wanted, number = book.assignment.propose(config)
    book.assign(wanted.give(["target-0", "target-1"], number))  # by a supervisor that ended then
    book.hear(describe("target-0", revision=number, pid=2))
    began = await desk_over(book).begin(Wish(config, None, Bounds()))
    assert [step["members"] for step in began["steps"]] == [["target-1"]]


async def test_a_rank_whose_process_is_older_than_all_known_settings_runs_the_current_ones(
    book: RouteBook,
) -> None:
    config = ClusterConfig.model_validate({"drafter": {"max_wait_ms": 77}})
    wanted, number = book.assignment.propose(config)
    book.assign(wanted.settle(number))
    later = ClusterConfig.model_validate({"drafter": {"max_wait_ms": 77, "gamma": 3}})
    book.assign(book.assignment.propose(later)[0].give(["drafter-0"], number + 1))
    began = await desk_over(book).begin(Wish(config, None, Bounds()))
    assert began["steps"] == [], "it never started with a block of 3"


@pytest.mark.parametrize("is_parked", [False, True])
async def test_a_parked_rank_takes_no_streams_from_one_that_is_drained(
    book: RouteBook, is_parked: bool
) -> None:
    desk = desk_over(book)
    if not is_parked:
        assert await desk.drain("target-0", is_drained=True) == ["target-0"]
        return
    book.hear(describe("target-1", "parked", revision=-1))
    with pytest.raises(RolloutError, match="drained or parked"):
        await desk.drain("target-0", is_drained=True)


async def test_parking_is_not_taken_for_the_rollout_that_somebody_watches(book: RouteBook) -> None:
    desk = desk_over(book)
    done = await desk.begin(Wish(ClusterConfig(), None, Bounds()))
    desk.scale(("target-1",), is_parked=True, bounds=Bounds())
    assert desk.progress() == done and done["outcome"] == "done"
    with pytest.raises(RolloutError, match="autoscale parks or starts"):
        await desk.begin(Wish(ClusterConfig(), None, Bounds()))


async def test_what_was_parked_starts_when_autoscale_is_switched_off(book: RouteBook) -> None:
    desk = desk_over(book)

    async def unasked(*_: Any) -> None:
        raise AssertionError("nobody is asked while it is off")

    scaling = AutoscaleDesk(book, desk, (), unasked)
    await scaling.look()
    assert not desk.is_busy
    book.hear(describe("target-1", "parked", revision=-1))
    await scaling.look()
    assert desk.is_busy and scaling.last is None
    rollout = desk._rollout
    assert rollout is not None
    assert (rollout.steps[0].unit.members, rollout.wanted) == (("target-1",), 1)
