"""A real rank keeps its confidences true: by acceptance rule, through budgets that trim, across a change of traffic."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.calibration import ece
from actors.core.logit_rules import LogitRules
from actors.core.messages import AbortRequest, StepReport
from actors.core.rank_calibration import RULE_NAMES, Drafted, RankCalibration
from actors.core.sampling import RULE_COUPLED, RULE_GREEDY
from configs.calibration import CalibrationConfig
from tests.pure.calibrated_session import GAMMA, OFTEN, TruthfulDrafter, serve, session
from tests.pure.rank_harness import Session
from tests.pure.scripted_drafter import (
    ALLOCATOR,
    endpoint,
)


def errors(served: Session, rule: int = RULE_GREEDY) -> list[float]:
    """ECE by position of what the rank believes of fresh blocks of its drafter."""
    confidences, right = served.drafter.blocks(20_000)
    rules = np.full(len(right), rule, np.int8)
    streams, yes = np.zeros(len(right), np.uint64), np.ones(len(right), np.bool_)
    believed = served.rank.calibration.adjust(Drafted(confidences, rules, streams, yes))
    survival, happened = believed.astype(np.float64).cumprod(1), right.cumprod(1) > 0
    return [ece(survival[:, k], happened[:, k]) for k in range(GAMMA)]


@pytest.mark.parametrize("bias", [1.0, -1.0])
def test_after_a_switch_of_traffic_the_alarm_fires_and_the_error_is_back_within_300_rounds(
    bias: float,
) -> None:
    left = []
    for seed in range(3):  # 300 rounds are few labels: what is promised holds in the mean
        served = session(0.0)
        drafter = served.drafter = TruthfulDrafter(0.0, seed)
        assert serve(served, 600) == []
        drafter.bias = bias
        assert max(errors(served)) > 0.15
        before = served.rank.counters.acceptance.num_rounds
        notes = serve(served, 290)
        assert served.rank.counters.acceptance.num_rounds - before <= 300
        assert served.rank.calibration.num_alarms == len(notes) >= 1
        assert "greedy rounds have drifted" in notes[0]
        left.append(errors(served))
    assert np.mean(left) < 0.03
    assert np.max(left) < 0.08


def test_wrong_confidences_are_put_right_and_everybody_sees_what_is_believed() -> None:
    served = session(1.0)
    served.rank.allocator = ALLOCATOR
    serve(served, 800)
    assert max(errors(served)) < 0.03
    table = served.rank.book.table
    decision = served.decisions[-1]
    raw = served.drafter.blocks(2000)[0].mean()
    believed = [d.survivals[d.has_draft, 0] for d in served.decisions[-60:]]
    assert np.concatenate(believed).mean() < raw - 0.1
    reports = [m for _, m in served.sent if isinstance(m, StepReport)]
    assert (reports[-1].survivals == decision.survivals).all()
    assert table.confidences.shape == (table.num_slots, GAMMA)


def test_switched_off_confidences_are_taken_as_they_come() -> None:
    served = session(1.0, CalibrationConfig(online=False))
    serve(served, 400)
    view = served.rank.calibration.view()
    assert max(errors(served)) > 0.15
    assert view["num_explored"] == view["num_alarms"] == 0
    assert view["by_rule"]["greedy"]["ece"][0] > 0.1  # measured all the same


# --- what is learned from ---------------------------------------------------------------------------------------


def test_each_acceptance_rule_learns_from_its_own_rounds() -> None:
    calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged")
    rng = np.random.default_rng(0)
    none = np.full(64, GAMMA, np.int32)
    for _ in range(40):
        rules = rng.choice([RULE_GREEDY, RULE_COUPLED], 64).astype(np.int8)
        right = rng.random((64, GAMMA)) < np.where(rules == RULE_GREEDY, 0.8, 0.3)[:, None]
        drafted = Drafted(
            np.full((64, GAMMA), 0.5, np.float32),
            rules,
            np.arange(64, dtype=np.uint64),
            np.ones(64, np.bool_),
        )
        accepted = right.cumprod(1).sum(1).astype(np.int32)
        calibration.learn(drafted, none, none, accepted, accepted + 1)
    believed = calibration.adjust(drafted)
    assert believed[rules == RULE_GREEDY].mean() == pytest.approx(0.8, abs=0.05)
    assert believed[rules == RULE_COUPLED].mean() == pytest.approx(0.3, abs=0.05)
    assert set(calibration.view()["by_rule"]) == {"greedy", "coupled"}
    assert len(RULE_NAMES) == 3
    calibration.restart()
    assert (calibration.adjust(drafted) == 0.5).all()


def test_requests_that_change_their_logits_teach_nothing_and_are_not_explored() -> None:
    served = session(1.0, OFTEN)
    serve(served, 200, rules=LogitRules(frequency_penalty=0.5))
    assert served.rank.calibration.view()["by_rule"] == {}
    assert served.rank.calibration.num_explored == 0
    serve(served, 200, logprobs=None)
    assert served.rank.calibration.num_explored > 0


def test_behind_a_stop_token_and_in_aborted_rounds_nothing_is_learned() -> None:
    calibration = RankCalibration(GAMMA, OFTEN, "lagged")
    drafted = Drafted(
        np.full((3, GAMMA), 0.5, np.float32),
        np.zeros(3, np.int8),
        np.zeros(3, np.uint64),
        np.ones(3, np.bool_),
    )
    whole = np.full(3, GAMMA, np.int32)
    accepted = np.array([GAMMA, 4, 0], np.int32)
    num_new = np.array([2, 0, 1], np.int32)  # cut at a stop token; aborted; refused at once
    calibration.learn(drafted, whole - 3, whole, accepted, num_new)
    greedy = calibration.by_rule[RULE_GREEDY]
    assert greedy.num_rounds == 2
    weight = 1 / OFTEN.explore_share
    assert greedy.reliability.num.sum(axis=1) == pytest.approx([2, 2, weight, weight, weight])
    assert greedy.reliability.accepted.sum(axis=1).tolist() == [1, 1, 0, 0, 0]
    assert calibration.num_explored == 3


def test_another_drafter_starts_afresh_and_alarms_stay_counted() -> None:
    served = session(1.0)
    serve(served, 300)
    assert max(errors(served)) < 0.1
    served.rank.set_drafters([endpoint("drafter-0", "drafter", "2")])
    assert max(errors(served)) > 0.15
    assert served.rank.is_idle is False
    served.deliver(served.rank.on_message(AbortRequest("r0", 0), served.now))


# --- exploration --------------------------------------------------------------------------------------------------
