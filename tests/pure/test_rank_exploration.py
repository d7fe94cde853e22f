"""A real rank verifies a small share of rounds whole, whatever the budget says, and lawfully."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.sampling import RULE_GREEDY
from actors.core.service_class import ClassAllocation, ServiceClass
from configs.calibration import CalibrationConfig
from tests.pure.calibrated_session import GAMMA, OFTEN, TruthfulDrafter, serve, session
from tests.pure.rank_harness import Session
from tests.pure.scripted_drafter import (
    RANK,
)


def explored_share(served: Session) -> float:
    rows = [(d, row) for d in served.decisions for row in np.flatnonzero(d.caps > 0)]
    return sum(d.is_explored(row) or d.cut_by(row) == "none" for d, row in rows) / len(rows)


@pytest.mark.parametrize("policy", ["static_threshold", "lagged", "algorithm1"])
def test_a_share_of_rounds_is_verified_whole_whatever_the_policy_trims(policy: str) -> None:
    served = session(-2.0, OFTEN, policy)  # it trims much
    serve(served, 600)
    calibration, decisions = served.rank.calibration, served.decisions
    assert calibration.num_explored > 50
    for decision in decisions:
        assert (decision.verify_len <= decision.caps).all()
        for row in np.flatnonzero(decision.caps):
            if decision.is_explored(row):
                assert decision.verify_len[row] == decision.caps[row]
    extra = sum(int((d.verify_len - d.planned_len).sum()) for d in decisions if d.num_reserved)
    assert calibration.num_explored_tokens == extra


def test_the_share_is_what_was_asked_for() -> None:
    calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged")
    rows = 64_000
    drafted = Drafted(
        np.zeros((rows, GAMMA), np.float32),
        np.zeros(rows, np.int8),
        np.arange(rows, dtype=np.uint64) % np.uint64(64),
        np.ones(rows, np.bool_),
    )
    lengths = (np.arange(rows) // 64).astype(np.int32)
    chosen = calibration.explore(drafted, lengths, np.full(rows, GAMMA, np.int32), 10**9)
    assert chosen.mean() == pytest.approx(1 / 64, rel=0.1)
    by_stream = chosen.reshape(-1, 64).mean(axis=0)
    assert by_stream.max() < 0.05 and (by_stream > 0).mean() > 0.99


@pytest.mark.parametrize("policy", ["none", "static_length"])
def test_a_policy_that_does_not_trim_by_survival_is_left_alone(policy: str) -> None:
    served = session(0.0, OFTEN, policy)
    serve(served, 100)
    assert served.rank.calibration.num_explored == 0
    assert all(d.verify_len.max(initial=0) <= 1 for d in served.decisions)


def test_exploration_keeps_to_the_room_of_the_step() -> None:
    """The scripted target refuses a step of more than `max_batch_tokens`."""
    served = session(0.0, CalibrationConfig(explore_share=0.25), max_batch_tokens=16)
    serve(served, 400)
    reserved = [d for d in served.decisions if d.num_reserved]
    assert reserved
    for decision in reserved:
        assert decision.verify_len.sum() <= decision.most_draft_tokens
        assert decision.num_reserved + decision.room <= 16


def test_a_class_that_limits_its_rows_limits_exploration_too() -> None:
    served = session(-2.0, OFTEN)
    served.rank.decider._classes = ClassAllocation([ServiceClass("short", max_verify_len=2)])
    serve(served, 300)
    assert served.rank.calibration.num_explored > 0
    assert max(int(d.verify_len.max(initial=0)) for d in served.decisions) == 2


def test_who_is_explored_does_not_depend_on_what_was_drafted() -> None:
    """Two drafters that disagree about everything: the same rounds of the same requests are explored."""
    found = []
    for seed in (1, 2):
        served = session(-3.0, OFTEN)
        served.drafter = TruthfulDrafter(-3.0, seed)
        calibration = served.rank.calibration
        seen: dict[tuple[int, int], bool] = {}
        plain = calibration.explore

        def watched(drafted, committed_len, caps, room, plain=plain, seen=seen):  # type: ignore[no-untyped-def]
            chosen = plain(drafted, committed_len, caps, room)
            keys = zip(drafted.streams.tolist(), committed_len.tolist(), strict=True)
            for key, teaches, is_chosen in zip(keys, drafted.teaches, chosen, strict=True):
                if teaches:
                    seen[key] = bool(is_chosen)
            return chosen

        calibration.explore = watched  # type: ignore[method-assign]
        serve(served, 200)
        found.append(seen)
    common = found[0].keys() & found[1].keys()
    assert len(common) > 50
    assert all(found[0][key] == found[1][key] for key in common)
    assert any(found[0][key] for key in common)


def test_a_round_that_was_explored_says_so() -> None:
    served = session(-2.0, OFTEN, explain_rounds=64)
    serve(served, 200)
    told = [
        r for name in served.streams for log in served.rank.book.logs.find(name) for r in log.rounds
    ]
    explored = [r for r in told if r.explored]
    assert explored and len(explored) < len(told)
    assert all(r.num_scheduled > 0 and r.cut_by in ("none", "length") for r in explored)
    assert RANK.role == "target"


def test_exploration_follows_a_policy_that_changes_while_serving():
    calibration = RankCalibration(GAMMA, OFTEN, "none")
    streams = np.arange(64, dtype=np.uint64)
    drafted = Drafted(
        np.full((64, GAMMA), 0.5, np.float32),
        np.full(64, RULE_GREEDY, np.int8),
        streams,
        np.ones(64, bool),
    )
    asked = np.arange(64, dtype=np.int32), np.full(64, GAMMA, np.int32), 10_000
    assert not calibration.explore(drafted, *asked).any()
    calibration.follow("lagged")
    assert calibration.explore(drafted, *asked).any()
    calibration.follow("static_length")
    assert not calibration.explore(drafted, *asked).any()
