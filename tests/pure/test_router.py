"""Where a new stream goes."""

from __future__ import annotations

from collections import Counter

import pytest

from actors.core.messages import (
    Endpoint,
    LoadView,
    RankLoad,
    RankRoute,
    RoutingTable,
)
from cluster.prefix_affinity import PrefixAffinity
from cluster.router import MAX_VIEW_AGE_S, Router


def endpoint(name: str, epoch: str = "e", role="target") -> Endpoint:
    return Endpoint(name, role, f"local://{name}", "", epoch)


def table(version: int, allocator: Endpoint | None = None, **states: str) -> RoutingTable:
    return RoutingTable(
        version,
        tuple(RankRoute(endpoint(n), s) for n, s in states.items()),  # type: ignore[arg-type]
        allocator,
    )


def view(version: int, age_s: float = 0.0, **tpot_s: float) -> LoadView:
    return LoadView(version, tuple(RankLoad(n, 2, 0, 10, 20, t, age_s) for n, t in tpot_s.items()))


def router_of(*ranks: str) -> Router:
    router = Router()
    router.update_table(table(1, **dict.fromkeys(ranks, "ready")))
    return router


def names(router: Router, now_s: float = 0.0) -> list[str]:
    return [route.endpoint.name for route in router.candidates(now_s)]


def test_ranks_take_turns_before_any_view():
    router = Router()
    router.update_table(table(1, a="ready", b="ready", c="ready"))
    firsts = Counter()
    for _ in range(30):
        best = names(router)[0]
        firsts[best] += 1
        router.begin(best)
    assert firsts == {"a": 10, "b": 10, "c": 10}


def test_only_ready_ranks_are_candidates():
    router = Router()
    router.update_table(table(1, a="starting", b="ready", c="draining", d="dead"))
    assert names(router) == ["b"]
    router.update_table(table(2, a="starting"))
    assert names(router) == [] and "a is starting" in router.why_unready()


def test_lowest_predicted_time_comes_first():
    router = Router()
    router.update_table(table(1, a="ready", b="ready", c="ready"))
    router.update_load(view(1, a=0.3, b=0.1, c=0.2), 0.0)
    assert names(router) == names(router) == ["b", "c", "a"]


def test_a_burst_between_two_views_spreads():
    router = Router()
    router.update_table(table(1, a="ready", b="ready"))
    router.update_load(view(1, a=0.1, b=0.11), 0.0)
    sent = Counter()
    for _ in range(20):
        best = names(router)[0]
        router.begin(best)
        sent[best] += 1
    assert min(sent["a"], sent["b"]) >= 8
    # A view that does not show them yet changes nothing.
    router.update_load(view(2, a=0.1, b=0.11), 0.0)
    for name, count in sent.items():
        for _ in range(count - 2):
            router.end(name)
    assert names(router)[0] == "a"


def test_a_view_that_shows_our_streams_is_believed():
    router = Router()
    router.update_table(table(1, a="ready", b="ready"))
    for _ in range(2):
        router.begin("a")
    router.update_load(view(1, a=0.1, b=0.11), 0.0)  # two requests run on each
    assert names(router)[0] == "a"
    router.begin("a")
    assert names(router)[0] == "b"


def test_a_view_of_streams_that_have_ended_does_not_hide_the_new_ones():
    router = Router()
    router.update_table(table(1, a="ready", b="ready"))
    loads = (RankLoad("a", 8, 0, 10, 20, 0.1, 0.0), RankLoad("b", 8, 0, 10, 20, 0.11, 0.0))
    router.update_load(LoadView(1, loads), 0.0)
    sent = Counter()
    for _ in range(16):
        best = names(router)[0]
        router.begin(best)
        sent[best] += 1
    assert min(sent["a"], sent["b"]) >= 7


def test_an_old_view_is_forgotten_and_ranks_take_turns_again():
    router = Router()
    router.update_table(table(1, a="ready", b="ready"))
    router.update_load(view(1, a=0.1, b=9.0), 0.0)
    late_s = MAX_VIEW_AGE_S + 1
    assert {names(router, late_s)[0] for _ in range(4)} == {"a", "b"}


def test_an_idle_rank_says_nothing_and_is_still_known_to_be_idle():
    router = Router()
    router.update_table(table(1, idle="ready", busy="ready"))
    busy = RankLoad("busy", 8, 0, 10, 20, 0.3, 0.1)
    idle = RankLoad("idle", 0, 0, 20, 20, 0.1, 10 * MAX_VIEW_AGE_S)
    router.update_load(LoadView(1, (busy, idle)), 0.0)
    assert [names(router)[0] for _ in range(4)] == ["idle"] * 4
    assert {names(router, MAX_VIEW_AGE_S + 1)[0] for _ in range(4)} == {"idle", "busy"}


def test_health_says_what_is_wrong_with_each_rank():
    router = Router()
    routes = (
        RankRoute(endpoint("a"), "ready", "", "rows depend", ("1 lease is open",)),
        RankRoute(endpoint("b"), "dead", "out of memory"),
        RankRoute(endpoint("c"), "ready"),
    )
    router.update_table(RoutingTable(1, routes))
    a, b, c = router.describe()
    assert (a["integrity_problems"], a["warning"]) == (["1 lease is open"], "rows depend")
    assert (b["integrity_problems"], b["reason"]) == ([], "out of memory")
    assert c == {"name": "c", "state": "ready", "revision": 1, "integrity_problems": []}


def test_older_tables_and_views_are_ignored_until_the_allocator_restarts():
    router = Router()
    first, second = endpoint("allocator", "1", "allocator"), endpoint("allocator", "2", "allocator")
    assert router.update_table(table(2, first, a="ready", b="ready"))
    assert not router.update_table(table(1, first, a="dead", b="dead"))
    assert router.update_load(view(7, a=0.2, b=0.1), 0.0)
    assert not router.update_load(view(6, a=0.1, b=0.2), 0.0)
    assert names(router)[0] == "b"
    router.update_table(table(3, second, a="ready", b="ready"))
    assert router.update_load(view(1, a=0.1, b=0.2), 0.0)
    assert names(router)[0] == "a"


def test_a_wanted_rank_comes_before_faster_ones_and_the_others_stay_as_they_are():
    router = Router()
    router.update_table(table(1, a="ready", b="ready", c="ready"))
    router.update_load(view(1, a=0.3, b=0.1, c=0.2), 0.0)
    assert [r.endpoint.name for r in router.candidates(0.0, "a")] == ["a", "b", "c"]
    assert [r.endpoint.name for r in router.candidates(0.0, "gone")] == ["b", "c", "a"]


PROMPT = list(range(600))


def first_for(router: Router, prompt: list[int], now_s: float = 0.0) -> str:
    return router.candidates(now_s, None, prompt)[0].endpoint.name


def test_a_prompt_goes_where_its_beginning_went_last():
    router = router_of("a", "b", "c")
    router.placed("b", PROMPT)
    assert [first_for(router, PROMPT) for _ in range(3)] == ["b"] * 3
    assert first_for(router, [*PROMPT[:64], 7, 7]) == "b"
    router.placed("c", [*PROMPT[:64], *[7] * 100])
    assert first_for(router, PROMPT) == "b", "the longer beginning decides"
    assert first_for(router, [*PROMPT[:32], 9]) == "c", "the later one"
    assert router.candidates(0.0, "a", PROMPT)[0].endpoint.name == "a", "who names a rank gets it"


def test_short_beginnings_and_ranks_that_are_gone_change_nothing():
    router = router_of("a", "b")
    router.placed("a", PROMPT[:31])
    router.placed("gone", PROMPT)
    assert {first_for(router, PROMPT[:31]) for _ in range(2)} == {"a", "b"}
    assert {first_for(router, PROMPT) for _ in range(2)} == {"a", "b"}


@pytest.mark.parametrize(("num_known", "num_more"), [(32, 1), (256, 2), (4096, 4)])
def test_affinity_ends_where_its_rank_has_too_many_requests(num_known: int, num_more: int):
    router = router_of("a", "b")
    prompt = list(range(num_known))
    router.placed("a", prompt)
    for _ in range(num_more):
        router.begin("a")
    assert first_for(router, prompt) == "a"
    router.begin("a")
    assert first_for(router, prompt) == "b"


def test_affinity_ends_where_a_token_takes_clearly_longer():
    router = router_of("a", "b")
    router.placed("a", PROMPT)
    router.update_load(view(1, a=0.012, b=0.01), 0.0)
    assert first_for(router, PROMPT) == "a"
    router.update_load(view(2, a=0.013, b=0.01), 0.0)
    assert first_for(router, PROMPT) == "b"


def test_the_least_recent_beginnings_are_forgotten():
    affinity = PrefixAffinity(most=2)
    first, second, third = ([number] * 40 for number in range(3))
    affinity.note(first, "a")
    affinity.note(second, "b")
    affinity.note(first, "a")
    affinity.note(third, "c")
    assert [affinity.find(prompt) for prompt in (first, second, third)] == [
        ("a", 32),
        None,
        ("c", 32),
    ]
