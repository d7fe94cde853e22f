"""What is wanted of members: held, drained, parked, which revision; told to all, and kept beyond a supervisor."""

from __future__ import annotations

from dataclasses import replace

from cluster.routing import RouteBook
from configs.schema import ClusterConfig
from tests.pure import test_routing
from tests.pure.test_routing import FIRST, MEMBERS, describe

book = test_routing.book


def test_a_held_rank_drains_at_once_and_takes_streams_again_only_when_it_has_heard(
    book: RouteBook,
) -> None:
    version = book.version
    book.hold(["target-1"], is_held=True)
    assert book.version > version and book.table().ranks[1].state == "draining"
    assert book.peers_of("target-1").is_drained and not book.peers_of("target-0").is_drained
    book.hear(describe("target-1"))  # it has not heard yet
    assert book.table().ranks[1].state == "draining"
    book.hold(["target-1"], is_held=False)
    assert book.table().ranks[1].state == "ready"
    book.hear(describe("target-1", "draining"))
    assert book.table().ranks[1].state == "draining"


def test_what_an_operator_drained_stays_drained_behind_a_rollout(book: RouteBook) -> None:
    book.assign(book.assignment.drain(["target-0"], is_drained=True))
    for is_held in (True, False):
        book.hold(["target-0"], is_held=is_held)
    assert book.peers_of("target-0").is_drained
    book.assign(book.assignment.drain(["target-0"], is_drained=False))
    assert book.table().ranks[0].state == "ready"


def test_a_supervisor_that_starts_again_takes_over_what_the_last_one_wanted() -> None:
    book = RouteBook(MEMBERS, 100, FIRST)
    assert book.peers_of("target-0").assignment is None, "nothing was ever rolled out"
    config = ClusterConfig.model_validate({"target": {"max_running": 7}})
    wanted, number = book.assignment.propose(config)
    book.assign(wanted.give(["target-0"], number))
    carried = book.peers_of("drafter-0").assignment
    later = RouteBook(MEMBERS, 200, FIRST)
    later.hear(describe("drafter-0", assignment=carried))
    assert later.assignment == carried
    assert later.members["target-0"].describe()["revision"] == number == 2
    assert later.table().ranks[0].revision == 2 and later.table().ranks[1].revision == 1
    older = replace(carried, version=1, numbers={}) if carried else None
    later.hear(describe("drafter-1", assignment=older))
    assert later.assignment == carried


def test_members_that_take_no_streams_are_in_the_table_too(book: RouteBook) -> None:
    assert [route.endpoint.name for route in book.table().others] == [
        "allocator",
        "drafter-0",
        "drafter-1",
    ]


def test_a_parked_rank_is_in_the_table_and_gets_no_streams(book: RouteBook) -> None:
    book.assign(book.assignment.give(["target-1"], -1))
    book.hear(describe("target-1", "parked"))
    route = book.table().ranks[1]
    assert (route.state, route.revision) == ("parked", 1)
    assert [rank.name for rank in book.peers_of("allocator").ranks] == ["target-0"]
