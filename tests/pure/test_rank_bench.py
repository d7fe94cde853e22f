"""What `dspark bench --ranks` runs and what it concludes, from made-up phases."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.core.capacity import BudgetRecord
from actors.core.messages import VerifyBudget
from cluster.cli import main
from cluster.client import Answer
from cluster.rank_bench import _settings, loads
from cluster.rank_bench_report import Kill, Phase, figure, reports_to_follow, summary, text
from configs.load import load

RANKS = ("target-0", "target-1")


def record(rank: str, step: int, requests: int, most: int, rule: str = "joint") -> BudgetRecord:
    budget = VerifyBudget(rank, "e", step, step + 2, step + 9, most, 0.1, rule)
    return BudgetRecord(step, float(step), requests, most, requests, 0.05, budget)


def phase(name: str, budgets: dict[str, list[tuple[int, int]]], **changes: Any) -> Phase:
    """`budgets`: (requests, budget) of the reports of each rank."""
    records = [
        record(rank, step, *pair)
        for rank, pairs in budgets.items()
        for step, pair in enumerate(pairs)
    ]
    base = Phase(
        name=name,
        crowded="target-0",
        seconds=2.0,
        records=records,
        answers=[Answer("a", "length", 30), Answer("b", "length", 10)],
        errors=[],
        num_chunks=40,
        decision_share=dict.fromkeys(RANKS, 0.01),
        allocator={"prediction_error": dict.fromkeys(RANKS, 0.1)},
    )
    return replace(base, **changes)


BEFORE = phase("before", {"target-0": [(3, 4), (8, 6), (8, 6)], "target-1": [(2, 10)] * 3})
SWITCHED = phase("switched", {"target-0": [(2, 10)] * 3, "target-1": [(1, 9), (8, 6), (8, 6)]})
DRILL = replace(BEFORE, name="drill", kill=Kill(77, 14, 2, 2), is_back=True)


def test_a_good_run_holds_and_says_so() -> None:
    report = summary([BEFORE, SWITCHED, DRILL], "joint")
    assert report["holds"] is True
    assert report["budgets_differ"] is True
    assert report["reports_to_follow"] == {"target-0": 1, "target-1": 1}
    assert report["medians"]["before"]["target-0"]["budget"] == 6  # of the full load only
    assert report["tokens_per_s"] == {"before": 20.0, "switched": 20.0, "drill": 20.0}
    assert report["drill"]["kill"] == {
        "pid": 77,
        "num_chunks": 14,
        "num_running": 2,
        "num_records": 2,
    }
    json.dumps(report)
    shown = text(report)
    assert "budgets differ by rank: yes" in shown and "killed while 2 streams ran" in shown


@pytest.mark.parametrize(
    ("phases", "what"),
    [
        ([BEFORE, SWITCHED, replace(DRILL, errors=["cut"])], "a failed stream"),
        ([BEFORE, SWITCHED, replace(DRILL, is_back=False)], "an allocator that stayed away"),
        ([BEFORE, SWITCHED, replace(DRILL, kill=None)], "a drill without a kill"),
        ([BEFORE, SWITCHED, replace(DRILL, kill=Kill(77, 40, 0, 5))], "a kill after the end"),
        ([BEFORE, SWITCHED, replace(DRILL, answers=[Answer("a", "length", 30)])], "another text"),
        ([BEFORE, replace(SWITCHED, answers=[]), DRILL], "another text after the switch"),
    ],
)
def test_what_went_wrong_is_not_called_good(phases: list[Phase], what: str) -> None:
    assert summary(phases, "joint")["holds"] is False, what


def test_budgets_that_are_alike_do_not_count_as_differing() -> None:
    flat = {rank: [(4, 6)] * 3 for rank in RANKS}
    same = [phase(name, flat) for name in ("before", "switched", "drill")]
    report = summary(same, "lagged")
    assert report["budgets_differ"] is False and report["holds"] is False
    assert report["reports_to_follow"] == dict.fromkeys(RANKS), "there was nothing to follow"


def test_reports_are_counted_from_the_first_that_shows_the_new_load() -> None:
    late = [(2, 2), (2, 4), (2, 10), (2, 10), (2, 10), (2, 10)]
    slow = phase("switched", {"target-0": late, "target-1": [(8, 6)] * 3})
    assert reports_to_follow(BEFORE, slow, "target-0") == 3
    report = summary([BEFORE, slow, DRILL], "joint")
    assert report["reports_to_follow"]["target-0"] == 3 and report["holds"] is False
    filling = phase("switched", {"target-1": [(1, 9), (4, 9), (8, 6), (8, 6), (7, 9)]})
    assert reports_to_follow(BEFORE, filling, "target-1") == 1


def test_the_same_streams_run_wherever_the_crowd_is() -> None:
    first, second = loads(RANKS, 3, 2, 0), loads(RANKS, 3, 2, 1)
    assert [s.rank for s in first] == ["target-0"] * 3 + ["target-1"] * 2
    assert [s.rank for s in second] == ["target-1"] * 3 + ["target-0"] * 2
    assert [replace(s, rank="") for s in first] == [replace(s, rank="") for s in second]
    assert len({s.seed for s in loads(("a", "b", "c"), 3, 2, 0)}) == 7


def test_the_bench_sets_what_it_needs_and_leaves_the_policy_to_the_user() -> None:
    given = ["policy.name=lagged", "ingress.allow_rank_hint=false"]
    config = load("laptop-cpu", _settings(argparse.Namespace(ranks=3, set=given)))
    assert config.target.num_ranks == config.drafter.num_actors == 3
    assert config.policy.name == "lagged"
    assert config.ingress.allow_rank_hint
    default = load("laptop-cpu", _settings(argparse.Namespace(ranks=2, set=[])))
    assert default.policy.name == "joint"


def test_one_rank_cannot_be_uneven(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--ranks", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = figure([BEFORE, SWITCHED, DRILL], tmp_path)
    assert path is not None and path.stat().st_size > 1000
