"""C1 and C3 with confidences corrected online and rounds explored: by enumeration, and through the real rank."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.local_policy import LocalPolicy
from actors.core.prefix_scheduler import allocate
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.round_decision import decide_with_explored
from actors.core.survival import survivals
from actors.core.verify_decision import VerifyDecider
from configs.calibration import CalibrationConfig
from tests.torch_cpu.exact_steps import StepRows
from tests.torch_cpu.planners import RANKS, ROOM, LocalPlanner
from tests.torch_cpu.table_streams import (
    GAMMA,
    LIMIT,
    chi_squared,
    small_rank,
    staircase,
    streams_of,
)
from tests.torch_cpu.test_losslessness import APPENDIX_A
from tests.torch_cpu.test_losslessness_steps import (
    CURVE,
    EVENTS,
    TOGETHER,
    appendix_a_twice,
    law_error,
    streams,
)

OFTEN = CalibrationConfig(explore_share=0.25)
Mask = npt.NDArray[np.bool_]


class Calibrated(LocalPlanner):
    """Confidences shifted by what older steps showed, of all and of each stream; every fourth round or so explored."""

    seen: int = 0
    calibration = RankCalibration

    def verify_len(self, memory: Hashable, rows: StepRows) -> npt.NDArray[np.int32]:
        key = (memory, rows.step, rows.key)
        if key not in self._lens:
            calibration = self.calibration(rows.survivals.shape[1], OFTEN, "lagged")
            old = np.frombuffer(memory, np.float32).sum() if isinstance(memory, bytes) else 0.0
            calibration._shifts[:] = 3.0 * np.sin(40.0 * float(old))
            ids = _ids(rows)
            for each in calibration.by_rule.values():  # of a stream: up to two logits
                each.streams.learn(ids, 34.0 * np.sin(30.0 * float(old) + ids), np.ones(len(ids)))
            self._lens[key] = self._calibrated(calibration, memory, rows)
        return self._lens[key]

    def _calibrated(
        self, calibration: RankCalibration, memory: Hashable, rows: StepRows
    ) -> npt.NDArray[np.int32]:
        decider = VerifyDecider(RANKS[0], "1", self.policy(), allocate)
        if memory is not None:
            self._decide(decider, self._old(rows, memory))
        before = np.column_stack((np.ones(len(rows.caps)), rows.survivals[:, :-1]))
        confidences = (rows.survivals / np.maximum(before, 1e-30)).astype(np.float32)
        ids = _ids(rows)
        drafted = Drafted(confidences, np.zeros(len(ids), np.int8), ids, rows.has_draft)
        # The exact check knows no committed length here; the step tells rounds apart as well.
        rounds = np.full(len(ids), rows.step, np.int32)
        decision = decide_with_explored(
            decider,
            calibration.explore(drafted, rounds, rows.caps, ROOM),
            step=rows.step,
            request_ids=tuple(map(str, rows.requests)),
            survivals=survivals(calibration.adjust(drafted), rows.has_draft),
            caps=rows.caps,
            has_draft=rows.has_draft,
            room=ROOM,
            num_prefill_tokens=rows.num_prefill_tokens,
            context_tokens=0,
        )
        self.seen += decision.num_reserved
        return decision.verify_len


def _ids(rows: StepRows) -> npt.NDArray[np.uint64]:
    """Of the requests; both are explored in some steps."""
    return np.array(rows.requests, np.uint64) + np.uint64(9)


class ExploresWhatLooksGood(RankCalibration):
    """A mutant: whole where the second slot looks good, which tells what the first token is."""

    def explore(self, drafted: Drafted, committed_len: Any, caps: Any, room: int) -> Mask:
        return drafted.teaches & (drafted.confidences[:, -1] > 0.5) & (caps > 0)


class ExploringMutant(Calibrated):
    calibration = ExploresWhatLooksGood


class BelievesTheWholeBlock(RankCalibration):
    """A mutant: a stream's shift from the round that is being decided; the last slot tells what the first token is."""

    def adjust(self, drafted: Drafted) -> npt.NDArray[np.float32]:
        confidences = drafted.confidences.copy()
        confidences[:, 0] = np.where(drafted.confidences[:, -1] > 0.5, 0.99, 0.01)
        return confidences


class BelievingMutant(Calibrated):
    calibration = BelievesTheWholeBlock


POLICIES = {
    "lagged": lambda: LocalPolicy("lagged"),
    "static_threshold": lambda: LocalPolicy("static_threshold", 0, 0.4),
    "algorithm1": lambda: LocalPolicy("algorithm1"),
}


@pytest.mark.parametrize("params", ["plain", "top_k and top_p"])
@pytest.mark.parametrize("name", POLICIES)
def test_corrected_confidences_and_explored_rounds_keep_the_joint_law(
    name: str, params: str
) -> None:
    planner = Calibrated(POLICIES[name], CURVE)
    both = [streams(21, 2, params, 4), streams(22, 2, params, 3)]
    assert law_error(planner, both, EVENTS) < 1e-9
    assert planner.seen > 0


def test_appendix_a_is_kept_and_what_goes_by_the_present_block_is_caught() -> None:
    for kind, is_caught in ((Calibrated, False), (ExploringMutant, True), (BelievingMutant, True)):
        planner = kind(lambda: LocalPolicy("static_threshold", 0, 0.9), APPENDIX_A)
        assert (law_error(planner, appendix_a_twice(), TOGETHER) > 1e-3) == is_caught


# --- through the real rank, learning as it goes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static_threshold", "lagged"])
def test_streams_of_a_rank_that_learns_and_explores_follow_the_law_of_the_target(name: Any) -> None:
    policy = LocalPolicy(name, static_threshold=0.5)
    policy.times.measured(staircase())
    rank = small_rank(policy)
    rank.calibration = RankCalibration(GAMMA, OFTEN, name)
    assert chi_squared(streams_of(rank, seed=1)) < LIMIT
    assert rank.calibration.num_explored > 100
    assert rank.calibration.view()["by_rule"]["rejection"]["shifts"] != [0.0, 0.0]


def test_a_rank_that_explores_by_current_confidences_is_found_out() -> None:
    rank = small_rank(LocalPolicy("static_threshold", static_threshold=0.95))
    rank.calibration = ExploresWhatLooksGood(GAMMA, OFTEN, "static_threshold")
    assert chi_squared(streams_of(rank, seed=1)) > 2 * LIMIT
