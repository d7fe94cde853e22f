"""What the supervisor concludes from answers and silence, and whom it tells about whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.core.messages import Endpoint
from actors.engine.base import DrafterSpec, TargetSpec
from actors.link import Role
from actors.peers import Description
from cluster.routing import MISSES_UNTIL_DEAD, MISSES_WHILE_STARTING, RouteBook, assigned
from configs.policy import PolicyConfig
from configs.revisions import Assignment
from configs.schema import ClusterConfig

MEMBERS: list[tuple[str, Role]] = [
    ("allocator", "allocator"),
    ("drafter-0", "drafter"),
    ("drafter-1", "drafter"),
    ("target-0", "target"),
    ("target-1", "target"),
]
FIRST = Assignment.first(ClusterConfig())
TARGET_SPEC = TargetSpec(
    "m", "a", 100, 8, 2, 512, (1,), (0,), "float32", "cpu", "fast", 64, 16, "id"
)


def describe(name: str, phase: Any = "ready", epoch: str = "e1", **changes: Any) -> Description:
    role: Any = name.split("-")[0]
    spec: Any = {"target": TARGET_SPEC, "drafter": DrafterSpec(name, 5, 64, 16, (0,), "id")}
    return replace(
        Description(
            name=name,
            role=role,
            phase=phase,
            detail="",
            endpoint=Endpoint(name, role, f"tcp://{name}", "key", epoch),
            spec=spec.get(role),
            draft_times=((1, 0.01),),
            peers_version=0,
            turn_age_s=0.0,
            pid=1,
            node_ip="127.0.0.1",
        ),
        **changes,
    )


@pytest.fixture
def book() -> RouteBook:
    book = RouteBook(MEMBERS, 100, FIRST)
    for name, _ in MEMBERS:
        book.hear(describe(name))
    return book


def test_a_silent_cluster_is_starting_and_has_endpoints_nobody_can_use() -> None:
    table = RouteBook(MEMBERS, 1, FIRST).table()
    assert [route.state for route in table.ranks] == ["starting", "starting"]
    assert table.allocator is None and table.max_model_len == 0
    assert table.ranks[0].endpoint.epoch == "" and table.ranks[0].reason


def test_a_book_that_starts_below_its_predecessor_goes_on_above_it() -> None:
    """The clock was set back, or the predecessor had published more versions than it lived seconds."""
    book = RouteBook(MEMBERS, 100, FIRST)
    book.hear(describe("target-0", peers_version=500))
    assert book.version > 500
    assert [member.name for member in book.behind()] == ["target-0"]
    book.outrun(501)  # an ingress replica had read a table that no member was told of
    assert book.table().version == book.version
    book.outrun(900)
    assert book.version > 900
    version = book.version
    book.outrun(version)
    book.hear(describe("target-0", peers_version=version))
    assert book.version == version, "its own versions are nobody else's"


def test_ready_members_are_published(book: RouteBook) -> None:
    table = book.table()
    assert [route.state for route in table.ranks] == ["ready", "ready"]
    assert table.ranks[1].endpoint.uri == "tcp://target-1"
    assert table.allocator is not None and table.max_model_len == 512


def test_the_version_rises_with_a_change_and_only_then(book: RouteBook) -> None:
    version = book.version
    book.hear(describe("target-0"))
    book.hear(describe("drafter-1", turn_age_s=3.0))
    assert book.version == version
    book.hear(describe("target-0", epoch="e2"))
    assert book.version == version + 1
    book.miss("drafter-0", "gone", has_ended=True)
    assert book.version == version + 2


def test_a_process_that_ended_is_dead_at_once(book: RouteBook) -> None:
    book.miss("target-0", "its process ended", has_ended=True)
    route = book.table().ranks[0]
    assert (route.state, route.reason) == ("dead", "its process ended")


def test_a_slow_process_is_dead_only_after_several_silent_pings(book: RouteBook) -> None:
    for _ in range(MISSES_UNTIL_DEAD - 1):
        book.miss("target-0", "slow", has_ended=False)
        assert book.table().ranks[0].state == "ready"
    assert book.members["target-0"].num_silences == 0
    for _ in range(2):
        book.miss("target-0", "slow", has_ended=False)
        assert book.table().ranks[0].state == "dead"
        assert book.members["target-0"].num_silences == 1


def test_an_ended_process_was_not_silent(book: RouteBook) -> None:
    book.miss("target-0", "its process ended", has_ended=True)
    assert book.members["target-0"].num_silences == 0


def test_a_process_that_loads_may_be_silent_for_longer_but_not_for_ever(book: RouteBook) -> None:
    book.hear(describe("target-0", "loading"))
    for _ in range(MISSES_WHILE_STARTING - 1):
        book.miss("target-0", "slow", has_ended=False)
        assert book.table().ranks[0].state == "starting"
    book.miss("target-0", "slow", has_ended=False)
    assert book.table().ranks[0].state == "dead"


def test_an_answer_forgives_earlier_silence(book: RouteBook) -> None:
    for _ in range(3 * MISSES_UNTIL_DEAD):
        book.miss("target-0", "slow", has_ended=False)
        assert book.table().ranks[0].state == "ready"
        book.hear(describe("target-0"))


def test_a_restart_is_counted_by_its_process_and_shows_its_phase(book: RouteBook) -> None:
    book.miss("target-0", "its process ended", has_ended=True)
    book.hear(describe("target-0", "loading", "e2", pid=2))
    member = book.members["target-0"]
    assert (member.num_restarts, member.state) == (1, "starting")
    assert "loading" in book.table().ranks[0].reason
    assert "target-0" not in [rank.name for rank in book.peers_of("drafter-0").ranks]


def test_the_cause_a_member_gave_is_the_reason_shown(book: RouteBook) -> None:
    book.blame("target-0", "RuntimeError: out of memory")
    book.miss("target-0", "its process ended", has_ended=True)
    assert book.table().ranks[0].reason == "RuntimeError: out of memory"


def test_a_failed_start_is_dead_with_its_cause(book: RouteBook) -> None:
    book.hear(describe("drafter-0", "failed", detail="CheckpointError: no such file"))
    assert book.members["drafter-0"].state == "dead"
    assert book.members["drafter-0"].last_failure == "CheckpointError: no such file"


def test_a_rank_gets_its_own_drafter_and_borrows_one_while_that_is_gone(book: RouteBook) -> None:
    def drafters(rank: str) -> list[str]:
        return [drafter.endpoint.name for drafter in book.peers_of(rank).drafters]

    assert (drafters("target-0"), drafters("target-1")) == (["drafter-0"], ["drafter-1"])
    book.miss("drafter-0", "gone", has_ended=True)
    assert (drafters("target-0"), drafters("target-1")) == (["drafter-1"], ["drafter-1"])
    book.hear(describe("drafter-0", epoch="e2", pid=2))
    assert drafters("target-0") == ["drafter-0"]


def test_no_allocator_and_no_drafter_are_told_as_such(book: RouteBook) -> None:
    for name in ("allocator", "drafter-0", "drafter-1"):
        book.miss(name, "gone", has_ended=True)
    peers = book.peers_of("target-0")
    assert peers.allocator is None and peers.drafters == ()


def test_draining_ranks_stay_known_to_those_that_serve_them(book: RouteBook) -> None:
    book.hear(describe("target-1", "draining"))
    assert book.table().ranks[1].state == "draining"
    assert [rank.name for rank in book.peers_of("drafter-1").ranks] == ["target-0", "target-1"]


def test_members_are_told_until_they_have_taken_the_version_over(book: RouteBook) -> None:
    assert {member.name for member in book.behind()} == {name for name, _ in MEMBERS}
    for name, _ in MEMBERS:
        book.hear(describe(name, peers_version=book.version))
    assert book.behind() == []
    book.hear(describe("target-0", epoch="e2", pid=2))
    assert len(book.behind()) == len(MEMBERS)


def test_what_is_wrong_with_a_rank_that_serves_is_published_until_it_is_over(
    book: RouteBook,
) -> None:
    version = book.version
    book.hear(describe("target-1", warning="rows depend", integrity_problems=("1 lease is open",)))
    route = book.table().ranks[1]
    assert (route.state, route.warning) == ("ready", "rows depend")
    assert route.integrity_problems == ("1 lease is open",)
    assert book.version == version + 1, "an ingress would keep the table it has"
    book.hear(describe("target-1"))
    assert book.table().ranks[1].integrity_problems == () and book.version == version + 2


@pytest.mark.parametrize(
    ("num_ranks", "drafters", "expected"),
    [
        (2, "ab", ["a", "b"]),
        (1, "abc", ["abc"]),
        (2, "abc", ["ac", "b"]),
        (3, "ab", ["a", "b", "a"]),
        (2, "-b", ["b", "b"]),
        (2, "--", ["", ""]),
        (2, "", ["", ""]),
        (3, "a-c", ["a", "c", "c"]),
    ],
)
def test_drafters_are_spread_evenly(num_ranks: int, drafters: str, expected: list[str]) -> None:
    alive = [None if letter == "-" else letter for letter in drafters]
    assert ["".join(assigned(i, num_ranks, alive)) for i in range(num_ranks)] == expected


def test_a_rank_that_its_group_keeps_waiting_says_so_and_changes_nothing_for_others(
    book: RouteBook,
) -> None:
    version = book.version
    book.hear(describe("target-0", waited_s=7.4))
    assert "kept it waiting for 7 s" in book.members["target-0"].reason
    assert book.members["target-0"].is_usable and book.version == version
    book.hear(describe("target-0", waited_s=0.1))
    assert book.members["target-0"].reason == ""


def test_a_rank_that_waits_for_its_group_is_starting(book: RouteBook) -> None:
    book.hear(describe("target-0", phase="forming", offer="h:1"))
    assert book.table().ranks[0].state == "starting"


def test_a_policy_reaches_everybody_who_is_told_of_the_peers(book: RouteBook) -> None:
    assert book.peers_of("target-0").order is None
    version = book.version
    order = book.command(PolicyConfig(name="none"))
    assert order.number > version and {m.name for m in book.behind()} == {n for n, _ in MEMBERS}
    assert {book.peers_of(name).order for name, _ in MEMBERS} == {order}
    assert book.command(PolicyConfig(name="lagged")).number > order.number


def test_a_supervisor_that_starts_again_learns_the_policy_from_whoever_has_it() -> None:
    told = RouteBook(MEMBERS, 100, FIRST).command(PolicyConfig(name="none"))
    later = RouteBook(MEMBERS, 200, FIRST)
    later.hear(describe("target-1"))
    later.hear(describe("target-0", order=told))
    version = later.version
    assert later.peers_of("target-1").order == told
    older = replace(told, number=told.number - 1)
    later.hear(describe("allocator", order=older))
    assert later.order == told and later.version >= version
