"""The order of a rollout: one unit at a time, streams first, back when the new revision does not come up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.rollout import MAX_LIVES, Action, Rollout, Sight
from actors.core.rollout_plan import (
    Bounds,
    NobodyLeftError,
    Unit,
    require_somebody_left,
    units_of,
)

OLD, NEW = 1, 2
BOUNDS = Bounds(drain_s=10, room_s=20, start_s=100)
UP = Sight(
    is_up=True, is_told=True, incarnation="p1", revision=OLD, num_free_blocks=90, num_places=9
)
D0, T0, T1 = (
    Unit(("drafter-0",), "drafter"),
    Unit(("target-0",), "target"),
    Unit(("target-1",), "target"),
)
GROUP = Unit(("target-0", "target-1"), "target")


class Cluster:
    """A rollout, and members that do what it says when they are told to."""

    def __init__(self, *units: Unit, bounds: Bounds = BOUNDS) -> None:
        names = ("drafter-0", "target-0", "target-1")
        self.sights = dict.fromkeys(names, UP)
        self.see("drafter-0", num_free_blocks=0, num_places=0)
        self.assigned = dict.fromkeys(names, OLD)
        self.rollout = Rollout(units, NEW, self.assigned.copy(), bounds)
        self.done: list[tuple[str, tuple[str, ...]]] = []
        self.now = 0.0
        self.lives = 1

    def see(self, *names: str, **changes: object) -> None:
        for name in names:
            self.sights[name] = replace(self.sights[name], **changes)  # type: ignore[arg-type]

    def tick(self, seconds: float = 1.0) -> list[Action]:
        self.now += seconds
        actions = self.rollout.advance(self.sights, self.now)
        for action in actions:
            self.done.append((action.kind, action.members))
            if action.kind == "assign":
                self.assigned.update(dict.fromkeys(action.members, action.revision))
        return actions

    def start_again(self, *names: str, **changes: object) -> None:
        """New processes of these members, with what they are assigned."""
        self.lives += 1
        for name in names:
            fresh = {
                "incarnation": f"p{self.lives}",
                "revision": self.assigned[name],
                "failure": "",
            }
            self.see(name, **{"is_up": True, "is_told": True, **fresh, **changes})

    @property
    def phases(self) -> list[str]:
        return [step.phase for step in self.rollout.steps]

    def restart_of(self, *names: str) -> None:
        """Run up to the restart of an idle unit, then bring it up."""
        while ("restart", names) not in self.done:
            self.tick()
        self.start_again(*names)


def test_drafters_go_first_then_ranks_and_of_a_group_all() -> None:
    ranks = ("target-0", "target-1")
    assert units_of(["drafter-0"], ranks, ()) == (D0, T0, T1)
    assert units_of(["drafter-0"], ranks, (ranks,)) == (D0, GROUP)
    assert units_of([], ["target-1"], (ranks,)) == (GROUP,)


def test_nothing_to_restart_is_done_at_once() -> None:
    assert Rollout((), NEW, {}, BOUNDS).outcome == "done"


def test_every_unit_in_turn_is_held_restarted_and_let_go_and_only_then_the_next() -> None:
    cluster = Cluster(D0, T0, T1)
    cluster.restart_of("drafter-0")
    cluster.tick(), cluster.tick()
    assert cluster.phases == ["done", "waiting", "waiting"]
    cluster.restart_of("target-0")
    assert cluster.phases == ["done", "restarting", "waiting"]
    cluster.tick()
    assert cluster.phases[1] == "rejoining"
    cluster.see("target-0", is_told=False)
    cluster.tick()
    assert cluster.phases[1] == "rejoining", "it must know the others before the next one goes"
    cluster.see("target-0", is_told=True)
    cluster.tick()
    cluster.restart_of("target-1")
    cluster.tick(), cluster.tick()
    assert cluster.rollout.outcome == "done" and cluster.rollout.advance(cluster.sights, 99) == []
    kinds = [(kind, *members) for kind, members in cluster.done]
    assert kinds == [
        ("assign", "drafter-0"),
        ("restart", "drafter-0"),
        ("free", "drafter-0"),
        *((kind, "target-0") for kind in ("hold", "assign", "restart", "free")),
        *((kind, "target-1") for kind in ("hold", "assign", "restart", "free")),
    ]


def test_streams_may_end_by_themselves_and_move_only_after_the_bound() -> None:
    cluster = Cluster(T0)
    cluster.see("target-0", num_streams=4, num_used_blocks=30)
    cluster.tick()
    assert cluster.done == [("hold", ("target-0",))]
    cluster.tick(9)
    assert cluster.done[-1][0] == "hold" and "4 streams run" in cluster.rollout.steps[0].note
    cluster.tick(2)
    assert cluster.done[-1] == ("move", ("target-0",))
    cluster.rollout.moved(4)
    cluster.see("target-0", num_streams=0)
    cluster.tick()
    assert cluster.done[-1] == ("restart", ("target-0",))
    assert cluster.rollout.steps[0].num_moved == 4


@pytest.mark.parametrize("unknown", [{"num_streams": None}, {"is_told": False}])
def test_a_rank_that_may_still_hold_a_stream_is_not_restarted(unknown: dict[str, object]) -> None:
    cluster = Cluster(T0)
    cluster.see("target-0", **unknown)
    cluster.tick(), cluster.tick()
    assert cluster.phases == ["draining"]


def test_a_rank_that_dies_while_it_drains_is_restarted_with_the_new_revision() -> None:
    cluster = Cluster(T0)
    cluster.see("target-0", num_streams=4)
    cluster.tick()
    cluster.see("target-0", is_up=False, is_told=False, why="dead")
    cluster.tick()
    assert cluster.done[-1] == ("restart", ("target-0",))


@pytest.mark.parametrize(
    ("lacking", "word"), [({"num_free_blocks": 10}, "KV blocks"), ({"num_places": 1}, "places")]
)
def test_streams_wait_for_room_elsewhere_and_without_any_the_rollout_ends_untouched(
    lacking: dict[str, object], word: str
) -> None:
    cluster = Cluster(T0, T1)
    cluster.see("target-0", num_streams=4, num_used_blocks=30)
    cluster.see("target-1", **lacking)
    cluster.tick(), cluster.tick(12)
    step = cluster.rollout.steps[0]
    assert word in step.note and step.phase == "draining" and step.num_moved == 0
    cluster.tick(20)
    assert cluster.rollout.outcome == "failed" and word in cluster.rollout.reason
    assert [kind for kind, _ in cluster.done] == ["hold", "free"]
    assert cluster.phases == ["failed", "waiting"] and cluster.assigned["target-0"] == OLD


def test_where_a_pause_is_allowed_streams_leave_without_room_elsewhere() -> None:
    cluster = Cluster(GROUP, bounds=replace(BOUNDS, allows_pause=True))
    cluster.see("target-0", num_streams=4, num_used_blocks=30)
    cluster.tick(), cluster.tick(12)
    assert cluster.done[-1] == ("move", ("target-0", "target-1"))


def test_all_ranks_at_once_are_refused_unless_a_pause_is_allowed() -> None:
    ranks = ["target-0", "target-1"]
    require_somebody_left((D0, T0, T1), ranks, BOUNDS)
    require_somebody_left((GROUP,), ranks, replace(BOUNDS, allows_pause=True))
    for unit, there in ((GROUP, ranks), (T0, ["target-0"])):
        with pytest.raises(NobodyLeftError, match="--allow-pause"):
            require_somebody_left((D0, unit), there, BOUNDS)


def test_nobody_goes_while_another_is_away_and_not_for_ever() -> None:
    cluster = Cluster(T0)
    cluster.see("target-1", is_up=False, why="loading")
    assert (
        cluster.tick() == [] and "target-1 is not ready (loading)" in cluster.rollout.steps[0].note
    )
    cluster.see("target-1", is_up=True)
    assert cluster.tick()[0].kind == "hold"
    late = Cluster(T0)
    late.see("target-1", is_up=False, why="loading")
    late.tick(), late.tick(101)
    assert late.rollout.outcome == "failed" and "target-1" in late.rollout.reason


def test_a_member_that_does_not_come_up_gets_its_old_revision_and_the_rollout_ends() -> None:
    cluster = Cluster(T0, T1)
    cluster.restart_of("target-0")
    cluster.see("target-0", is_up=False, failure="MemoryError: no room", why="failed")
    cluster.tick()
    assert cluster.phases == ["rolling back", "waiting"]
    assert cluster.assigned["target-0"] == OLD and cluster.done[-1] == ("restart", ("target-0",))
    cluster.start_again("target-0")
    assert [a.kind for a in cluster.tick()] == ["free"]
    assert cluster.phases == ["rolled back", "waiting"]
    assert cluster.rollout.outcome == "failed" and "MemoryError" in cluster.rollout.reason
    assert cluster.rollout.steps[0].ended_s == cluster.now


def test_what_the_old_process_says_while_it_ends_is_no_failure_of_the_new_one() -> None:
    cluster = Cluster(T0)
    while ("restart", ("target-0",)) not in cluster.done:
        cluster.tick()
    cluster.see("target-0", is_up=False, failure="GroupLeftError", why="stopped")
    assert cluster.tick() == [] and cluster.phases == ["restarting"]


def test_a_process_that_ends_again_and_again_without_a_word_is_given_up() -> None:
    cluster = Cluster(T0)
    cluster.restart_of("target-0")
    cluster.see("target-0", incarnation="", is_up=False)  # nothing is known of it yet
    cluster.tick()
    for _ in range(MAX_LIVES):
        cluster.start_again("target-0", is_up=False, why="loading")
        cluster.tick()
    assert cluster.phases == ["restarting"]
    cluster.start_again("target-0", is_up=False, why="loading")
    cluster.tick()
    assert (
        cluster.phases == ["rolling back"] and f"ended {MAX_LIVES} times" in cluster.rollout.reason
    )


@pytest.mark.parametrize("phase", ["restarting", "rejoining"])
def test_a_member_that_is_not_ready_in_time_is_rolled_back(phase: str) -> None:
    cluster = Cluster(T0)
    cluster.restart_of("target-0")
    if phase == "rejoining":
        cluster.tick()
    cluster.see("target-0", is_up=False, why="loading")
    cluster.tick(101)
    assert cluster.phases == ["rolling back"] and "within 100 s" in cluster.rollout.reason


def test_a_process_that_began_before_it_heard_of_the_way_back_is_ended_too() -> None:
    cluster = Cluster(T0)
    cluster.restart_of("target-0")
    cluster.see("target-0", is_up=False, failure="MemoryError")
    cluster.tick()
    cluster.start_again("target-0", revision=NEW)
    assert cluster.tick() == [Action("restart", ("target-0",))]
    assert cluster.tick() == [], "once is enough"


def test_a_member_that_does_not_come_back_with_its_old_revision_either_is_told() -> None:
    cluster = Cluster(T0)
    cluster.restart_of("target-0")
    cluster.see("target-0", is_up=False, failure="MemoryError")
    cluster.tick(), cluster.tick(101)
    assert cluster.phases == ["failed"] and cluster.rollout.outcome == "failed"
    assert "not with the old settings either: target-0: MemoryError" in cluster.rollout.reason
    assert cluster.done[-1] == ("free", ("target-0",))


def test_a_group_goes_back_as_a_whole() -> None:
    cluster = Cluster(GROUP, bounds=replace(BOUNDS, allows_pause=True))
    while ("restart", GROUP.members) not in cluster.done:
        cluster.tick()
    cluster.start_again(*GROUP.members, is_up=False, why="forming")
    cluster.see("target-1", failure="MemoryError")
    cluster.tick()
    assert cluster.done[-1] == ("restart", GROUP.members)
    assert cluster.assigned["target-0"] == cluster.assigned["target-1"] == OLD


@pytest.mark.parametrize("streams", [0, 4])
def test_asked_to_stop_it_ends_between_two_units_or_before_a_restart(streams: int) -> None:
    cluster = Cluster(T0, T1)
    cluster.restart_of("target-0")
    cluster.rollout.is_stopping = True
    cluster.tick(), cluster.tick()
    assert cluster.phases[0] == "done", "what has begun is finished"
    cluster.tick()
    assert cluster.rollout.outcome == "stopped" and cluster.phases == ["done", "waiting"]
    begun = Cluster(T0)
    begun.see("target-0", num_streams=4)
    begun.tick()
    begun.rollout.is_stopping = True
    assert begun.tick() == [Action("free", ("target-0",))]
    assert begun.rollout.outcome == "stopped" and begun.phases == ["failed"]
