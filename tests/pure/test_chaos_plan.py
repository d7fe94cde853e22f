"""The plan of a storm follows from its seed, and asks for what was asked."""

from __future__ import annotations

from collections import Counter

from cluster.chaos.load import make_requests
from cluster.chaos.plan import KINDS, next_possible, plan


def test_a_plan_has_every_kind_as_often_as_asked_and_only_the_seed_decides_the_rest() -> None:
    first, again, other = plan(KINDS, 5, 1), plan(KINDS, 5, 1), plan(KINDS, 5, 2)
    assert first == again != other
    assert Counter(fault.kind for fault in first) == dict.fromkeys(KINDS, 5)
    assert [fault.number for fault in first] == list(range(5 * len(KINDS)))
    assert all(0 <= fault.pick < 1 and 0 <= fault.size < 1 and fault.gap_s >= 0 for fault in first)
    assert [fault.kind for fault in first] != sorted(fault.kind for fault in first)


def test_a_fault_whose_victims_are_all_down_lets_others_pass() -> None:
    faults = plan(["rank", "drafter"], 3, 0)
    drafters = [fault for fault in faults if fault.kind == "drafter"]
    assert next_possible(faults, {"rank": False, "drafter": True}) == drafters[0]
    assert next_possible(faults, {"rank": True, "drafter": True}) == faults[0]
    assert next_possible(faults, {"rank": False}) is None


def test_requests_are_greedy_and_seeded_and_the_same_for_a_seed() -> None:
    requests = make_requests(3)
    assert requests == make_requests(3) != make_requests(4)
    bodies = [request.body("m") for request in requests]
    assert sum("seed" in body for body in bodies) == len(bodies) / 2
    assert all(("seed" in body) == (body["temperature"] > 0) for body in bodies)
