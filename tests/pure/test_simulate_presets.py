"""What the presets promise: the paper's figures, what joint budgets are worth, and that adaptive never costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.commands.simulate import preset_names
from cluster.simulation.experiments import Report, num_steps, run
from cluster.simulation.scenario import load


def answers(preset: str, *overrides: str) -> dict[str, Any]:
    return report(preset, *overrides).answers


def report(preset: str, *overrides: str) -> Report:
    return run(load(preset, list(overrides)), lambda _: None)


@pytest.fixture(scope="module")
def v4_flash() -> Report:
    return report("v4-flash", "measure.steps=100")


def test_v4_flash_reproduces_the_published_gain_and_budgets(v4_flash: Report) -> None:
    found = v4_flash.answers
    assert found["gain_at_80"] == pytest.approx(0.51, rel=0.15)
    published = {"20": 4.94, "50": 4.60, "100": 4.12, "150": 3.75, "200": 3.48}
    assert found["budget_by_concurrency"] == pytest.approx(published, rel=0.15)
    budgets = list(found["budget_by_concurrency"].values())
    assert budgets == sorted(budgets, reverse=True)
    for systems in found["throughput_deviation"].values():
        assert all(abs(deviation) < 0.07 for deviation in systems.values())


def test_v4_flash_has_both_frontiers(v4_flash: Report) -> None:
    frontier = {line["system"]: line["points"] for line in v4_flash.answers["frontier"]}
    for ours, theirs in zip(frontier["dspark-5"], frontier["mtp-1"], strict=True):
        assert ours["tps"] > theirs["tps"]
        assert ours["throughput_per_rank"] > theirs["throughput_per_rank"]


@pytest.fixture(scope="module")
def skewed() -> Report:
    return report("skewed-lockstep", "measure.steps=60")


def test_joint_budgets_beat_local_choice_on_skewed_load(skewed: Report) -> None:
    found = skewed.answers
    assert found["joint_over_local"] >= 1.2
    assert found["joint_gain"] == pytest.approx(found["joint_over_local"] - 1)
    assert found["ratios"]["local"] >= 1.1


def test_a_deadline_protects_the_tenant_that_joint_budgets_would_trim(skewed: Report) -> None:
    by_system = {p.result.system: p.result for p in skewed.points}
    assert by_system["joint"].by_tenant["crowd"]["tps"] < 30
    kept = by_system["joint-deadline"]
    assert kept.by_tenant["crowd"]["tps"] >= 0.98 * 35
    assert kept.throughput > 1.1 * by_system["local-padded"].throughput


@pytest.mark.parametrize(
    "sweep", ["[1, 16, 64]", pytest.param("[2, 4, 8, 32, 128, 256, 512]", marks=pytest.mark.slow)]
)
def test_adaptive_lengths_are_never_worse_than_the_best_fixed_one(sweep: str) -> None:
    lowest = answers("load-sweep", f"sweep={sweep}")["over_best_fixed"]["lowest"]
    assert lowest["lagged"] >= 0.99
    assert lowest["joint"] >= 0.99


@pytest.mark.parametrize("number", [10, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_balanced_load_loses_nothing_to_joint_budgets(number: int) -> None:
    found = answers("balanced-lockstep", f"num_configurations={number}")
    assert len(found["gains"]) == number
    assert found["lowest_gain"] >= -0.005


@pytest.mark.parametrize("number", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_uneven_load_gains_and_never_loses(number: int) -> None:
    """Neither against local choice padded to the maximum nor against local choice as it is."""
    found = report("random-skew", f"num_configurations={number}")
    assert found.answers["joint_gain"] > 0.03
    assert found.answers["lowest_gain"] >= -0.005
    rates = [point.result.throughput for point in found.points]
    unpadded = [joint / local - 1 for local, joint in zip(rates[1::3], rates[2::3], strict=True)]
    assert min(unpadded) >= -0.005


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_says_what_it_assumes_and_how_long_it_takes(name: str) -> None:
    scenario = load(name)
    assert scenario.name == name
    assert scenario.assumptions
    assert num_steps(scenario) > 100


def test_the_command_prints_a_table_and_ends_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", "measure.steps=5", "--set", "sweep=[50, 150, 250]", "--seed", "3"]
    code = main(["simulate", "--preset", "v4-flash", "--json", "--out", str(tmp_path), *options])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    found = json.loads(lines[-1])
    assert found["preset"] == "v4-flash" and found["seed"] == 3
    assert {"gain_at_80", "budget_by_concurrency", "frontier", "assumptions", "rows"} <= set(found)
    assert any("tok/s/user" in line for line in lines[:-1])
    assert any("CALIBRATED" in line for line in lines[:-1])
    names = {Path(path).name for path in found["files"]}
    assert names == {"rows.csv", "frontier.png", "budgets.png", "over_best_fixed.png"}
    for path in found["files"]:
        assert Path(path).stat().st_size > 100
    header, *rows = (tmp_path / "v4-flash" / "rows.csv").read_text(encoding="utf-8").splitlines()
    assert header.startswith("load,system,throughput,") and len(rows) == 12


@pytest.mark.parametrize(
    ("preset", "override", "pictures"),
    [
        (
            "skewed-lockstep",
            "measure={warmup_steps: 0, steps: 3}",
            {"throughput.png", "budget_by_rank.png"},
        ),
        ("balanced-lockstep", "num_configurations=2", {"gains.png"}),
    ],
)
def test_every_kind_of_preset_has_its_text_and_pictures(
    preset: str,
    override: str,
    pictures: set[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["simulate", "--preset", preset, "--set", override, "--out", str(tmp_path)])
    assert code == 0
    assert "joint" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / preset).glob("*.png")} == pictures


def test_nothing_is_written_when_no_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    override = ["--set", "measure={warmup_steps: 0, steps: 3}"]
    assert main(["simulate", "--preset", "skewed-lockstep", "--out", "", *override]) == 0
    assert "joint over local-padded" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_unknown_preset_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--preset", "nowhere", "--json"]) == 2
    captured = capsys.readouterr()
    assert "presets: balanced-lockstep" in captured.err
    assert "error" in json.loads(captured.out.splitlines()[-1])
