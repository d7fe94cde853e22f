"""C3 with blocks that stop: the joint law of whole streams, over prices that are two steps old; by enumeration."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import pytest

from actors.core.draft_stop import stop_survivals
from actors.core.local_policy import LocalPolicy
from actors.core.prefix_scheduler import allocate
from actors.core.round_decision import decide_with_explored, within_drafted
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import StepFacts, VerifyDecider
from tests.torch_cpu.exact_steps import StepRows
from tests.torch_cpu.planners import RANKS, ROOM, LocalPlanner
from tests.torch_cpu.test_losslessness import APPENDIX_A
from tests.torch_cpu.test_losslessness_steps import (
    CURVE,
    EVENTS,
    TOGETHER,
    appendix_a_twice,
    law_error,
    streams,
)

Float32 = npt.NDArray[np.float32]
SHARE = 0.9


class Stopping(LocalPlanner):
    """Blocks end at a share of the price that was found two steps before; every third round is explored, whole."""

    num_stopped = 0
    num_seen = 0

    def verify_len(self, memory: Hashable, rows: StepRows) -> npt.NDArray[np.int32]:
        key = (memory, rows.step, rows.key)
        if key not in self._lens:
            self._lens[key] = self._stopped(memory, rows)
        return self._lens[key]

    def stops(self, price: VerifyChoice, rows: StepRows) -> Float32:
        return stop_survivals(price, SHARE, np.zeros(len(rows.caps), np.int32))

    def _stopped(self, memory: Hashable, rows: StepRows) -> npt.NDArray[np.int32]:
        decider = VerifyDecider(RANKS[0], "1", self.policy(), allocate)
        price = VerifyChoice(0, 1.0, "no_drafts")
        if memory is not None:
            old = self._old(rows, memory)
            self._decide(decider, old)
            # What the last step's decision rested on.
            facts = StepFacts(rows.step, old.survivals, old.caps, old.step, old.survivals, 0, 0)
            price = self.policy().choose(facts)
        explored = ((2 * np.array(rows.requests, np.int64) + rows.step) % 3 == 0) & rows.has_draft
        stops = np.where(explored, 0.0, self.stops(price, rows))
        goes_on = np.logical_and.accumulate(rows.survivals >= stops[:, None], axis=1)
        drafted_len = goes_on.sum(axis=1).astype(np.int32)
        decision = decide_with_explored(
            decider,
            explored,
            step=rows.step,
            request_ids=tuple(map(str, rows.requests)),
            survivals=(rows.survivals * goes_on).astype(np.float32),
            caps=rows.caps,
            has_draft=rows.has_draft,
            room=ROOM,
            num_prefill_tokens=rows.num_prefill_tokens,
            context_tokens=0,
        )
        self.num_stopped += int((drafted_len < rows.caps).sum())
        self.num_seen += int(explored.sum())
        return within_drafted(decision, drafted_len).verify_len


class StopsByWhatComes(Stopping):
    """A mutant: a block whose last slot looks bad is not drafted at all, which tells what the first token is."""

    def stops(self, price: VerifyChoice, rows: StepRows) -> Float32:
        return np.where(rows.survivals[:, -1] < 0.5, 1.0, 0.0).astype(np.float32)


POLICIES = {
    "lagged": lambda: LocalPolicy("lagged"),
    "static_threshold": lambda: LocalPolicy("static_threshold", 0, 0.4),
    "static_length": lambda: LocalPolicy("static_length", 2),
    "algorithm1": lambda: LocalPolicy("algorithm1"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_that_stop_at_an_old_price_keep_the_joint_law(name: str) -> None:
    planner = Stopping(POLICIES[name], CURVE)
    both = [streams(21, 2, "plain", 5), streams(22, 2, "plain", 4)]
    assert law_error(planner, both, EVENTS) < 1e-9
    assert planner.num_seen > 0
    assert (planner.num_stopped > 0) == (name in ("lagged", "static_threshold"))


def test_appendix_a_is_kept_and_a_stop_by_what_comes_is_caught() -> None:
    for kind, is_caught in ((Stopping, False), (StopsByWhatComes, True)):
        planner = kind(lambda: LocalPolicy("static_threshold", 0, 0.7), APPENDIX_A)
        assert (law_error(planner, appendix_a_twice(), TOGETHER) > 1e-3) == is_caught
