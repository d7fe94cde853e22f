"""From a scenario to its answer: every system at every load, and the figures the comparison is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.simulation.engine import Simulation
from cluster.simulation.random_scenarios import drawn
from cluster.simulation.recorder import Result
from cluster.simulation.scenario import Closed, Open, Scenario, System

FIXED = ("none", "static_length")


@dataclass(frozen=True)
class Point:
    """One system under one load."""

    load: str  # requests a rank, or what the load is
    result: Result


@dataclass
class Report:
    """All points of a scenario and what they add up to (`answers`: the keys of the JSON object)."""

    scenario: Scenario
    points: list[Point] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def of(self, system: str) -> list[Point]:
        return [point for point in self.points if point.result.system == system]

    def as_json(self) -> dict[str, Any]:
        rows = [{"load": point.load, **point.result.row()} for point in self.points]
        return {
            "preset": self.scenario.name,
            "seed": self.scenario.seed,
            **self.answers,
            "assumptions": self.scenario.assumptions,
            "rows": rows,
        }


def num_steps(scenario: Scenario) -> int:
    """How many group steps the experiment takes, for a progress bar."""
    per_run = (scenario.measure.warmup_steps + scenario.measure.steps) * scenario.machine.num_groups
    runs = len(scenario.systems) * max(len(scenario.sweep), 1, scenario.num_configurations)
    return per_run * runs


def run(scenario: Scenario, progress: Callable[[int], None]) -> Report:
    """Run the whole experiment. `progress` is told of every group step."""
    if scenario.kind == "random_configurations":
        return _random_configurations(scenario, progress)
    report = Report(scenario)
    for name, load in _loads(scenario):
        for system in scenario.systems:
            result = Simulation(scenario, system, load, scenario.seed).run(progress)
            report.points.append(Point(name, result))
    report.answers["frontier"] = _frontier(report)
    if scenario.kind == "published":
        report.answers |= _against_published(report)
    if scenario.compare:
        report.answers |= _ratio(report, *scenario.compare)
    if any(system.policy == "static_length" for system in scenario.systems):
        report.answers["over_best_fixed"] = _over_best_fixed(report)
    return report


def _loads(scenario: Scenario) -> list[tuple[str, Closed | Open]]:
    load = scenario.load
    if isinstance(load, Open):
        if not scenario.sweep:
            return [(f"{load.rate_per_s:g}/s", load)]
        return [
            (f"{rate}/s", load.model_copy(update={"rate_per_s": float(rate)}))
            for rate in scenario.sweep
        ]
    if scenario.sweep:
        return [
            (str(number), load.model_copy(update={"requests_per_rank": number}))
            for number in scenario.sweep
        ]
    per_rank = load.requests_per_rank
    name = str(per_rank) if isinstance(per_rank, int) else "/".join(map(str, per_rank))
    return [(name, load)]


def _frontier(report: Report) -> list[dict[str, Any]]:
    """Tokens a second and user against tokens a second and rank, a line a system."""
    return [
        {
            "system": system.name,
            "points": [
                {
                    "concurrency": round(point.result.concurrency_per_rank, 2),
                    "tps": round(point.result.tps, 3),
                    "throughput_per_rank": round(point.result.throughput_per_rank, 2),
                }
                for point in report.of(system.name)
            ],
        }
        for system in report.scenario.systems
    ]


def _against_published(report: Report) -> dict[str, Any]:
    published = report.scenario.published
    assert published is not None, "kind: published needs the section `published`"
    ours, base = (system.name for system in report.scenario.systems[:2])
    sla = published.sla_tps
    gain = throughput_at(report.of(ours), sla) / throughput_at(report.of(base), sla) - 1.0
    budgets = {p.load: round(p.result.budget_per_request, 3) for p in report.of(ours)}
    by_load = {(p.load, p.result.system): p.result.throughput_per_rank for p in report.points}
    deviation = {
        str(load): {
            name: round(by_load[str(load), name] / value - 1.0, 4)
            for name, value in systems.items()
            if (str(load), name) in by_load
        }
        for load, systems in published.throughput_by_concurrency.items()
    }
    return {
        f"gain_at_{sla:g}": round(gain, 4),
        "published_gain": published.gain_at_sla,
        "budget_by_concurrency": {
            str(load): budgets[str(load)]
            for load in published.budget_by_concurrency
            if str(load) in budgets
        },
        "published_budget": {str(k): v for k, v in published.budget_by_concurrency.items()},
        "throughput_deviation": deviation,
        "source": published.source,
    }


def throughput_at(points: list[Point], tps: float) -> float:
    """Throughput a rank where a user sees `tps`: between the loads that were run, straight."""
    pairs = sorted((point.result.tps, point.result.throughput_per_rank) for point in points)
    speeds, rates = zip(*pairs, strict=True)
    return float(np.interp(tps, speeds, rates))


def _ratio(report: Report, ours: str, base: str) -> dict[str, Any]:
    """`joint_over_local` and the like: the ratio of throughputs at the first load; the gain is that less one."""
    first = {point.result.system: point.result.throughput for point in reversed(report.points)}
    ratio = first[ours] / first[base]
    short = base.split("-")[0]
    return {
        f"{ours}_over_{short}": round(ratio, 4),
        f"{ours}_gain": round(ratio - 1.0, 4),
        "compared": [ours, base],
        "ratios": {
            name: round(first[ours] / rate, 4) for name, rate in first.items() if name != ours
        },
    }


def _over_best_fixed(report: Report) -> dict[str, Any]:
    """Each adaptive system's throughput over the best of none and every fixed length, load by load."""
    fixed = {system.name for system in report.scenario.systems if system.policy in FIXED}
    adaptive = [s for s in report.scenario.systems if _is_rival(s, report.scenario.systems)]
    loads = list(dict.fromkeys(point.load for point in report.points))
    rates = {(p.load, p.result.system): p.result.throughput for p in report.points}
    best = {load: max(rates[load, name] for name in fixed) for load in loads}
    ratios = {
        system.name: {load: round(rates[load, system.name] / best[load], 4) for load in loads}
        for system in adaptive
    }
    lowest = {name: min(by_load.values()) for name, by_load in ratios.items()}
    return {"by_load": ratios, "lowest": lowest}


def _is_rival(system: System, systems: list[System]) -> bool:
    """Fixed lengths are a bar only for a system that drafts as they do."""
    same = [other for other in systems if other.policy == "static_length"]
    return system.policy not in FIXED and any(other.gamma == system.gamma for other in same)


def _random_configurations(scenario: Scenario, progress: Callable[[int], None]) -> Report:
    """The compared systems on random machines and loads."""
    assert scenario.compare is not None, "kind: random_configurations needs `compare`"
    ours, base = scenario.compare
    report = Report(scenario)
    ratios = []
    for number in range(scenario.num_configurations):
        case = drawn(scenario, number)
        results = {
            system.name: Simulation(case, system, case.load, scenario.seed + number).run(progress)
            for system in case.systems
        }
        report.points += [Point(case.title, result) for result in results.values()]
        ratios.append(results[ours].throughput / results[base].throughput)
    report.answers = {
        f"{ours}_over_{base.split('-')[0]}": round(float(np.mean(ratios)), 4),
        f"{ours}_gain": round(float(np.mean(ratios)) - 1.0, 4),
        "compared": [ours, base],
        "lowest_gain": round(min(ratios) - 1.0, 4),
        "highest_gain": round(max(ratios) - 1.0, 4),
        "gains": [round(ratio - 1.0, 4) for ratio in ratios],
    }
    return report
