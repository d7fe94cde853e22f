"""Looking at the cluster: seldom, never in vain, and never older than it says."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.core.messages import LoadView, RankLoad, VerifyBudget
from cluster import exposition as exposed
from cluster import watch_routes
from cluster.exposition import exposition
from cluster.observation import LOOK_INTERVAL_S, MAX_STALE_S, Observation, Observer
from cluster.telemetry import DispatchCounters, FrontMetrics

TARGET = {"name": "target-0", "role": "target", "state": "ready", "num_restarts": 0}
TARGET |= {"revision": 1, "memory_bytes": 1 << 20}


class Supervisor:
    """Answers as `Supervisor.observe` does; what it says can be set."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.stats: dict[str, Any] = {"target-0": {"count": 1}}
        self.fails = False

    async def observe(self, name: str, front: dict[str, Any]) -> dict[str, Any]:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("gone")
        fronts = {name: front, "ingress-1": {"count": 9}}
        return {"members": [TARGET], "num_killed": 0, "stats": self.stats, "fronts": fronts}


class Clock:
    """Stands in for the loop's."""

    now = 100.0


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: clock.now)
    return clock


async def test_many_that_look_at_once_ask_once(clock: Clock) -> None:
    supervisor, own = Supervisor(), {"count": 0}
    observer = Observer("ingress-0", lambda: dict(own), supervisor.observe)
    seen = await asyncio.gather(*(observer.look() for _ in range(5)))
    assert supervisor.num_asked == 1 and seen[4].stats == {"target-0": {"count": 1}}
    own["count"] = 7
    assert (await observer.look()).fronts == {"ingress-0": {"count": 7}, "ingress-1": {"count": 9}}
    assert supervisor.num_asked == 1
    clock.now += LOOK_INTERVAL_S
    await observer.look()
    assert supervisor.num_asked == 2


async def test_a_silent_member_keeps_what_it_said_with_its_age_and_not_for_ever(
    clock: Clock,
) -> None:
    supervisor = Supervisor()
    observer = Observer("ingress-0", dict, supervisor.observe)
    await observer.look()
    supervisor.stats = {"target-0": {"error": "TimeoutError()"}}
    clock.now += 5
    seen = await observer.look()
    assert seen.of_role("target") == [("target-0", {"count": 1})]
    assert seen.stale_s == {"target-0": 5.0}
    clock.now += MAX_STALE_S
    seen = await observer.look()
    assert seen.of_role("target") == [] and seen.members


async def test_without_an_answer_of_the_supervisor_the_last_look_stays_and_the_failure_counts(
    clock: Clock,
) -> None:
    supervisor = Supervisor()
    observer = Observer("ingress-0", dict, supervisor.observe)
    first = await observer.look()
    supervisor.fails = True
    clock.now += 5
    seen = await observer.look()
    assert seen.stats == first.stats and seen.at_s == first.at_s and seen.num_failed_looks == 1


async def test_a_replica_without_a_supervisor_shows_itself() -> None:
    seen = await Observer("ingress-0", lambda: {"count": 3}, None).look()
    assert seen.fronts == {"ingress-0": {"count": 3}} and not seen.members


async def test_the_counters_of_all_replicas_are_in_one_scrape() -> None:
    def front(num_tokens: int) -> dict[str, Any]:
        metrics = FrontMetrics()
        metrics.finish("stop", 2, num_tokens, duration_s=0.2)
        metrics.finish("abort", 2, num_tokens, duration_s=99.0)
        return {
            **metrics.snapshot(),
            "dispatch": vars(DispatchCounters()),
            "num_streams": 0,
            "streams": [],
            "keys": {},
            "num_unknown_keys": 0,
            "memory_bytes": 5 << 20,
            "busy_share": 0.25,
            "lag_s": 0.002,
        }

    async def ask(name: str, own: dict[str, Any]) -> dict[str, Any]:
        other = {"ingress-1": front(20)}
        return {"members": [], "num_killed": 0, "stats": {}, "fronts": other}

    seen = await Observer("ingress-0", lambda: front(10), ask).look()
    families = {f.name: f for f in text_string_to_metric_families(exposition(seen, 'a "model"'))}
    tokens = families["vllm:generation_tokens"].samples
    assert {s.labels["engine"]: s.value for s in tokens} == {"ingress-0": 20, "ingress-1": 40}
    assert {s.labels["model_name"] for s in tokens} == {'a "model"'}
    lags = families["dspark:ingress_lag_seconds"].samples
    assert {s.labels["ingress"]: s.value for s in lags} == {"ingress-0": 0.002, "ingress-1": 0.002}
    memory = {s.labels["member"]: s.value for s in families["dspark:member_memory_bytes"].samples}
    assert memory == {"ingress-0": 5 << 20, "ingress-1": 5 << 20}
    buckets = {
        s.labels["le"]: s.value
        for s in families["vllm:e2e_request_latency_seconds"].samples
        if s.name.endswith("_bucket") and s.labels["engine"] == "ingress-0"
    }
    assert (buckets["0.1"], buckets["0.25"], buckets["60.0"], buckets["+Inf"]) == (0, 1, 1, 2)


async def test_the_scrape_says_what_the_allocator_thinks_of_each_rank() -> None:
    budget = VerifyBudget("a", "e", 1, 3, 9, 7, 0.25, "joint")
    loads = (
        RankLoad("a", 2, 0, 10, 20, 0.1, 0.0, budget, 0.125, num_fallback_steps=7),
        RankLoad("b", 0, 0, 0, 0, 0.1, 0.0),
    )
    allocator = {
        "load": asdict(LoadView(1, loads, num_refused_curves=2)),
        "num_by_rule": {"joint": 5},
        "num_fallbacks": 1,
        "num_stale_reports": 0,
        "num_refused_curves": 2,
        "link": {},
    }
    seen = Observation(
        members=({**TARGET, "name": "allocator", "role": "allocator"},),
        stats={"allocator": allocator},
    )
    found = {
        (sample.name, sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(exposition(seen, "m"))
        for sample in family.samples
    }
    assert found["dspark:rank_budget_tokens", "a"] == 7
    assert found["dspark:rank_price", "a"] == 0.25
    assert found["dspark:rank_prediction_error", "a"] == 0.125
    assert found["dspark:fallback_steps_total", "a"] == 7
    assert found["dspark:fallback_steps_total", "b"] == 0
    assert found["dspark:refused_curves_total", None] == 2
    assert not {(name, rank) for name, rank in found if rank == "b" and "rank_" in name}


def rank_stats(group: dict[str, Any] | None) -> dict[str, Any]:
    names = [key for _, _, key in (*exposed.RANK_COUNTERS, *exposed.RANK_GAUGES)]
    clock = {key: 0.0 for _, _, key in exposed.RANK_SECONDS} | {"last_predicted_s": None}
    counts: dict[str, list[int]] = {
        key: [] for key in ("proposed", "scheduled", "accepted", "expected")
    }
    acceptance = {**counts, "num_rounds": 0}
    seen = {"num_rounds": 9, "num_alarms": 2, "shifts": [0.5, -0.25], "ece": [0.125, None]}
    explored = {"num_explored": 3, "num_explored_tokens": 8, "num_alarms": 2}
    calibration = {**explored, "by_rule": {"greedy": seen}}
    more = {"clock": clock, "acceptance": acceptance, "last_step": None, "link": {}}
    more["calibration"] = calibration
    more |= {"num_prefix_asked_tokens": 40, "num_prefix_hit_tokens": 16}
    return {**dict.fromkeys(names, 1), **more, "group": group}


async def test_the_scrape_says_how_true_confidences_are_and_what_it_costs_to_know() -> None:
    seen = Observation(members=(TARGET,), stats={"target-0": rank_stats(None)})
    found = {
        (sample.name, sample.labels.get("rule"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(exposition(seen, "m"))
        for sample in family.samples
    }
    assert found["dspark:explored_rounds_total", None, None] == 3
    assert found["dspark:explored_tokens_total", None, None] == 8
    assert found["vllm:prefix_cache_queries_total", None, None] == 40
    assert found["vllm:prefix_cache_hits_total", None, None] == 16
    assert found["dspark:calibration_alarms_total", None, None] == 2
    assert found["dspark:calibration_shift", "greedy", "1"] == -0.25
    assert found["dspark:calibration_error", "greedy", "0"] == 0.125
    assert ("dspark:calibration_error", "greedy", "1") not in found


def test_the_dashboard_shows_what_a_group_tells_of_its_load() -> None:
    """The rest of its queries are checked against a running cluster."""
    panels = json.loads((watch_routes.FOLDER / "grafana.json").read_text(encoding="utf-8"))[
        "panels"
    ]
    names = {name for name, *_ in exposed.GROUP_GAUGES}
    shown = {t["expr"]: t["legendFormat"] for panel in panels for t in panel["targets"]}
    shown = {query: legend for query, legend in shown.items() if query in names}
    assert {"dspark:expert_imbalance", "dspark:worst_token_imbalance"} <= set(shown)
    group = {key: 2 for _, _, key in (*exposed.GROUP_COUNTERS, *exposed.GROUP_GAUGES)}
    seen = Observation(members=(TARGET,), stats={"target-0": rank_stats(group)})
    labels = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(exposition(seen, "m"))
        for sample in family.samples
    }
    for query, legend in shown.items():
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels[query]


async def test_the_scrape_says_how_even_the_load_of_a_group_is() -> None:
    group = {key: 2 for _, _, key in (*exposed.GROUP_COUNTERS, *exposed.GROUP_GAUGES)}

    def scraped(group: dict[str, Any] | None) -> dict[str, float]:
        seen = Observation(members=(TARGET,), stats={"target-0": rank_stats(group)})
        families = text_string_to_metric_families(exposition(seen, "m"))
        return {s.name: s.value for family in families for s in family.samples}

    found = scraped({**group, "expert_imbalance": 1.25, "most_imbalance": 1.5})
    assert found["dspark:expert_imbalance"] == 1.25
    assert found["dspark:worst_token_imbalance"] == 1.5
    assert found["dspark:rebalances_total"] == found["dspark:uncaptured_steps_total"] == 2
    assert "dspark:expert_imbalance" not in scraped({**group, "expert_imbalance": None})
    assert not [name for name in scraped(None) if "group" in name or "imbalance" in name]
