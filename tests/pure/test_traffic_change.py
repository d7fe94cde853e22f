"""The alarm: bounded where nothing changes, early where labels or confidences do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.traffic_change import MAX_LOOKS, MOST_CERTAIN, Look, TrafficChange

Float64 = npt.NDArray[np.float64]
BOUND = 50.0
ROUNDS, STREAMS = 4, 8  # of a look, of each stream


class World:
    """Streams of 60 rounds, each with a shift of its own and mean features of its own."""

    def __init__(self, seed: int, bound: float = BOUND) -> None:
        self.rng = np.random.default_rng(seed)
        self.change = TrafficChange(2, bound)
        self.shift, self.features = 0.0, np.zeros(2)
        self.keys = np.arange(STREAMS, dtype=np.uint64)
        self.own = self.rng.normal(0, 1, (3, STREAMS))

    def look(self) -> int:
        known = self.change.known(0.0, 0.005)
        streams = np.tile(self.keys, ROUNDS)
        at = np.tile(np.arange(STREAMS), ROUNDS)
        information = np.full(len(at), 0.5)
        gap = self.shift + 0.3 * self.own[0, at]
        residual = information * gap + self.rng.normal(0, np.sqrt(0.5), len(at))
        features = self.features + 0.3 * self.own[1:, at].T + self.rng.normal(0, 0.5, (len(at), 2))
        for i in np.flatnonzero(self.rng.random(STREAMS) < ROUNDS / 60):
            self.keys[i] = self.keys.max() + np.uint64(1)
            self.own[:, i] = self.rng.normal(0, 1, 3)
        labels = np.full((3, 5, 4), float(self.keys.max()))
        return self.change.add(Look.of(streams, residual, information, features, known, labels))


def alarms(world: World, count: int) -> list[int]:
    """After which of so many looks the alarm went off."""
    found = []
    for i in range(count):
        changed = world.look()
        if changed:
            found.append(i)
            world.change.forget(changed)
    return found


def test_where_nothing_changes_alarms_are_rarer_than_one_in_bound_looks() -> None:
    assert sum(len(alarms(World(seed), 400)) for seed in range(5)) <= 2000 / BOUND


def test_a_higher_bound_makes_them_rarer_and_later() -> None:
    first = []
    for bound in (20.0, 2000.0):
        world = World(1, bound)
        alarms(world, 100)
        world.shift = 0.6
        first.append(alarms(world, 200)[0])
    assert first[0] < first[1]


@pytest.mark.parametrize("of", ["labels", "first feature", "second feature"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_change_is_found_whatever_shows_it_and_when_it_began(of: str, sign: int) -> None:
    for seed in range(4):
        world = World(10 + seed)
        for _ in range(100):
            changed = world.look()
            if changed:
                world.change.forget(changed)
        if of == "labels":
            world.shift = 0.8 * sign
        else:
            world.features[int(of == "second feature")] = 0.6 * sign
        since, changed = 0, 0
        while not changed and since < 60:
            since, changed = since + 1, world.look()
        assert 0 < changed <= since + 6
        assert changed >= since - 8
        assert since < 30


def test_the_first_looks_are_held_against_nothing() -> None:
    world = World(3)
    world.shift = 5.0
    assert [world.look() for _ in range(8)] == [0] * 8
    assert world.change.evidence == 0.0


def test_what_is_kept_after_an_alarm_are_the_newest_looks() -> None:
    world = World(2)
    for _ in range(20):
        world.look()
    newest = [look.labels for look in world.change._looks][-3:]
    assert (world.change.forget(3) == sum(newest)).all()
    assert len(world.change._looks) == 3
    for _ in range(2 * MAX_LOOKS):
        world.look()
    assert len(world.change._looks) == MAX_LOOKS


def test_no_change_is_more_than_certain() -> None:
    world = World(4)
    for _ in range(20):
        world.look()
    world.features = np.full(2, 1e4)
    assert world.look() > 0
    assert np.log(world.change.evidence) <= MOST_CERTAIN + np.log(MAX_LOOKS)


def test_few_streams_do_not_say_how_alike_their_rounds_are() -> None:
    change = TrafficChange(1, BOUND)
    ones = np.ones(2)
    change.add(
        Look.of(
            np.arange(2, dtype=np.uint64),
            9 * ones,
            ones,
            np.zeros((2, 1)),
            change.known(0, 1),
            ones,
        )
    )
    assert change.alike() == 1.0
