"""The simulator keeps its books: equal drafts, closed and open load, padding, traces, input that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.console import CommandError
from cluster.simulation.engine import Simulation
from cluster.simulation.recorder import Result
from cluster.simulation.scenario import Closed, Open, Scenario, load
from cluster.simulation.traces import build


def scenario(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "test",
        "title": "test",
        "machine": {
            "ranks_per_group": 2,
            "curve": {"base_s": 0.01, "per_token_s": 1e-4, "tread": 8, "max_tokens": 512},
        },
        "tenants": [
            {"name": "all", "acceptance": {"means": [[0.8] * 4]}, "output_tokens": 40},
        ],
        "load": {"kind": "closed", "requests_per_rank": 8, "lifetime": "rounds"},
        "systems": [
            {"name": "none", "policy": "none", "gamma": 4},
            {"name": "static-2", "policy": "static_length", "length": 2, "gamma": 4},
            {"name": "padded", "policy": "lagged", "gamma": 4, "pad_to_max": True},
            {"name": "lagged", "policy": "lagged", "gamma": 4},
            {"name": "joint", "policy": "joint", "gamma": 4},
            {"name": "threshold", "policy": "static_threshold", "threshold": 0.6, "gamma": 4},
            {"name": "algorithm1", "policy": "algorithm1", "gamma": 4},
        ],
        "measure": {"warmup_steps": 5, "steps": 60},
    }
    return Scenario.model_validate({**values, **changes})


def run(case: Scenario, system: str, load: Closed | Open | None = None, seed: int = 0) -> Result:
    (chosen,) = [s for s in case.systems if s.name == system]
    return Simulation(case, chosen, load or case.load, seed).run()


def test_a_run_is_a_function_of_its_seed() -> None:
    assert run(scenario(), "joint") == run(scenario(), "joint")
    assert run(scenario(), "joint") != run(scenario(), "joint", seed=1)


@pytest.mark.parametrize(
    "system", ["none", "static-2", "lagged", "joint", "threshold", "algorithm1"]
)
def test_expected_tokens_are_what_chance_accepts_on_average(system: str) -> None:
    result = run(scenario(measure={"warmup_steps": 5, "steps": 400}), system)
    assert result.sampled_throughput == pytest.approx(result.throughput, rel=0.03)
    assert result.concurrency_per_rank == 8


def test_fixed_lengths_verify_what_they_say() -> None:
    assert run(scenario(), "none").budget_per_request == 1.0
    assert run(scenario(), "none").acceptance_length == 1.0
    assert run(scenario(), "static-2").budget_per_request == 3.0
    assert run(scenario(), "static-2").acceptance_length == pytest.approx(1 + 0.8 + 0.64, rel=0.05)


def test_a_step_lasts_as_long_as_its_slowest_rank_and_padding_counts_for_all() -> None:
    """Ranks of 1 and 9 requests: 9 tokens are the second tread; the group's share counts 10 or, padded, 18."""
    machine = {
        "ranks_per_group": 2,
        "curve": {"batch_tokens": [8, 9, 64], "step_time_s": [0.01, 0.02, 0.02]},
        "shared": {"tokens": [0, 100], "seconds": [0.0, 0.1]},
    }
    case = scenario(
        machine=machine,
        load={"kind": "closed", "requests_per_rank": [1, 9]},
        systems=[
            {"name": "none", "policy": "none"},
            {"name": "padded", "policy": "none", "pad_to_max": True},
        ],
    )
    assert run(case, "none").step_time_s == pytest.approx(0.02 + 0.010)
    assert run(case, "padded").step_time_s == pytest.approx(0.02 + 0.018)
    assert run(case, "none").batch_tokens_max_over_mean == pytest.approx(9 / 5)


def test_every_policy_sees_the_same_drafts() -> None:
    """Lives are counted in rounds: what a request shows in a step does not depend on what was verified."""
    twins = [
        {"name": "joint", "policy": "joint", "gamma": 4},
        {"name": "static-4", "policy": "static_length", "length": 4, "gamma": 4},
    ]
    free = {"ranks_per_group": 2, "curve": {"batch_tokens": [1, 900], "step_time_s": [0.01, 0.011]}}
    case = scenario(systems=twins, machine=free)
    assert run(case, "joint").acceptance_length == pytest.approx(
        run(case, "static-4").acceptance_length, rel=1e-3
    )


def test_a_request_is_never_verified_past_its_last_token() -> None:
    case = scenario(
        tenants=[{"name": "all", "acceptance": {"means": [[0.99] * 4]}, "output_tokens": 1}],
        load={"kind": "closed", "requests_per_rank": 4},
    )
    result = run(case, "static-2")
    assert result.budget_per_request == 1.0
    assert result.sampled_throughput == pytest.approx(8 / result.step_time_s)


def test_open_load_serves_what_arrives() -> None:
    arrivals = Open(kind="open", rate_per_s=40.0, routing="least_loaded")
    tenants = [
        {
            "name": "all", "acceptance": {"means": [[0.8] * 4]}, "output_tokens": 40,
            "prompt_tokens": 100,
        }
    ]  # fmt: skip
    case = scenario(tenants=tenants, measure={"warmup_steps": 300, "steps": 1500})
    result = run(case, "joint", arrivals)
    assert 0 < result.ttft_p50_s < 0.2
    assert result.tpot_p99_s >= result.tpot_p50_s > 0
    busy = result.sampled_throughput
    assert busy == pytest.approx(40 * 40, rel=0.35)  # idle times are left out of the rate


def test_a_rank_takes_no_more_than_it_may_and_the_rest_waits() -> None:
    machine = {"max_requests": 4, "curve": {"base_s": 0.01, "per_token_s": 1e-4}}
    case = scenario(machine=machine, load={"kind": "closed", "requests_per_rank": 10})
    assert run(case, "static-2").concurrency_per_rank == 4


def test_arrivals_are_read_from_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "arrivals.csv"
    lines = [f"{at * 0.5},all,0,20" for at in range(6)]
    trace.write_text("time_s,tenant,prompt,output\n" + "\n".join(lines) + "\n", encoding="utf-8")
    case = scenario(measure={"warmup_steps": 0, "steps": 10_000})
    result = run(case, "none", Open(kind="open", rate_per_s=1.0, trace=str(trace)))
    assert result.sampled_throughput * result.step_time_s == pytest.approx(1.0)  # one at a time
    trace.write_text("time_s,tenant,prompt,output\n1,nobody,0,20\n", encoding="utf-8")
    with pytest.raises(CommandError, match=r"line 2.*tenants are all"):
        run(case, "none", Open(kind="open", rate_per_s=1.0, trace=str(trace)))
    with pytest.raises(CommandError, match="no such file"):
        run(case, "none", Open(kind="open", rate_per_s=1.0, trace="missing.csv"))


def test_confidences_are_read_from_a_trace(tmp_path: Path) -> None:
    recorded = tmp_path / "confidences.npy"
    np.save(recorded, np.tile([[0.5, 0.5, 0.5, 0.5]], (10, 1)))
    case = scenario(tenants=[{"name": "all", "acceptance": {"trace": str(recorded)}}])
    assert run(case, "static-2").acceptance_length == pytest.approx(1.75)
    for bad, complaint in (
        (np.zeros((3, 2)), "shape"),
        (np.full((3, 4), 1.5), "0..1"),
        (np.zeros((0, 4)), "shape"),
    ):
        np.save(recorded, bad)
        with pytest.raises(CommandError, match=complaint):
            run(case, "static-2")
    recorded.unlink()
    with pytest.raises(CommandError, match="no such file"):
        run(case, "static-2")


@pytest.mark.parametrize("persistence", [0.0, 0.9])
def test_synthetic_confidences_have_the_means_asked_for(persistence: float) -> None:
    (tenant,) = scenario(
        tenants=[
            {
                "name": "all",
                "acceptance": {
                    "means": [[0.9, 0.8], [0.5, 0.4]], "shares": [3, 1],
                    "concentration": 3.0, "persistence": persistence,
                },
            }
        ]
    ).tenants  # fmt: skip
    trace = build(tenant.acceptance, 3, seed=0)
    means = trace.confidences.mean(axis=0)
    assert means == pytest.approx([0.8, 0.7, 0.7], abs=0.01)
    assert (np.diff(trace.survivals, axis=1) <= 0).all()
    first = trace.confidences[:8000, 0]
    correlation = float(np.corrcoef(first[:-1], first[1:])[0, 1])
    assert (correlation > 0.7) == (persistence > 0.5)


def test_a_slow_rank_and_noise_are_part_of_the_machine() -> None:
    machine = {"ranks_per_group": 2, "curve": {"base_s": 0.01, "per_token_s": 1e-9}}
    assert run(scenario(machine=machine), "none").step_time_s == pytest.approx(0.01, rel=1e-3)
    slow = scenario(machine={**machine, "rank_speed": [1.0, 1.5]})
    assert run(slow, "none").step_time_s == pytest.approx(0.015, rel=1e-3)
    noisy = run(scenario(machine={**machine, "noise": 0.2}), "none")
    assert noisy.step_time_s == pytest.approx(0.01, rel=0.15)
    assert noisy.step_time_s != pytest.approx(0.01, rel=1e-4)


def test_tenants_of_a_rank_follow_their_shares() -> None:
    tenants = [
        {"name": name, "acceptance": {"means": [[0.8] * 4]}, "rank_shares": shares}
        for name, shares in (("left", [1, 0]), ("right", [0, 1]))
    ]
    result = run(scenario(tenants=tenants), "none")
    assert {name: row["share"] for name, row in result.by_tenant.items()} == {
        "left": 0.5, "right": 0.5,
    }  # fmt: skip
    with pytest.raises(CommandError, match="no tenant has a share on rank 1"):
        run(scenario(tenants=tenants[:1]), "none")


def test_many_ranks_run() -> None:
    machine = {
        "num_groups": 2, "ranks_per_group": 64,
        "curve": {"base_s": 0.02, "per_token_s": 3e-5, "tread": 16},
    }  # fmt: skip
    case = scenario(machine=machine, measure={"warmup_steps": 3, "steps": 3})
    result = run(case, "joint")
    assert result.throughput == pytest.approx(128 * result.throughput_per_rank)
    assert len(result.budget_by_rank) == 64


@pytest.mark.parametrize(
    ("source", "overrides", "complaint"),
    [
        ("nowhere", [], "no such preset"),
        ("v4-flash", ["measure.steps"], "KEY=VALUE"),
        ("v4-flash", ["measure.steps=0"], r"measure\.steps = 0"),
        ("v4-flash", ["measure.stepz=3"], r"measure\.stepz = 3"),
        ("v4-flash", ["systems.0.gamma=none"], r"systems\.0\.gamma"),
        ("v4-flash", ["systems.9.gamma=3"], "no systems.9.gamma"),
        ("v4-flash", ["machine.curve.base_s=0"], "base_s"),
    ],
)
def test_a_scenario_that_cannot_be_run_is_refused(
    source: str, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(CommandError, match=complaint) as refused:
        load(source, overrides)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [", encoding="utf-8")
    with pytest.raises(CommandError, match="not YAML"):
        load(str(path))
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(CommandError):
        load(str(path), ["a=1"])
