"""How far blocks are drafted: what a rank asks for, when it asks for whole blocks, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.core.draft_stop import stop_survivals
from actors.core.messages import CommitBatch, VerifyBudget
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.row_table import Mask
from actors.core.service_class import ClassAllocation, ServiceClass
from actors.core.step_decision import VerifyChoice
from actors.core.verify_decision import StepFacts
from configs.calibration import CalibrationConfig
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import RANK

ALIKE = np.zeros(3, np.int32)
GAMMA = 5


class Priced:
    """Every slot at or above a price."""

    def __init__(self, price: float, most: int = 99) -> None:
        self.choice = VerifyChoice(most, price, "static_threshold")

    def choose(self, facts: StepFacts) -> VerifyChoice:
        return self.choice


def asked(session: Session) -> Iterator[tuple[str, int, float]]:
    """(request, committed length, survival below which it may stop) of each block asked for, in order."""
    for _, message in session.sent:
        if isinstance(message, CommitBatch):
            for i in np.flatnonzero(message.wants_block).tolist():
                ids, lens, stops = (
                    message.request_ids,
                    message.committed_lens,
                    message.min_survivals,
                )
                yield ids[i], int(lens[i]), float(stops[i])


def serve(policy: Any, num_requests: int = 3, max_new: int = 24, **changes: Any) -> Session:
    limits = {"gamma": GAMMA, "stop_share": 0.25, **changes}
    session = Session(make_rank(policy, **limits))
    for i in range(num_requests):
        session.submit(admitted(str(i), [3 + i, 1, 4], max_new))
    session.run()
    return session


# --- the decision ----------------------------------------------------------------------------------------------------


def test_a_block_may_stop_at_a_share_of_the_price() -> None:
    stops = stop_survivals(VerifyChoice(9, 0.2, "lagged"), 0.25, ALIKE)
    np.testing.assert_array_equal(stops, np.full(3, 0.05, np.float32))


def test_under_class_weights_the_price_is_a_worth() -> None:
    choice = VerifyChoice(9, 0.2, "joint", class_weights=(1.0, 0.5, 0.01))
    stops = stop_survivals(choice, 0.25, np.array([0, 1, 1, 2], np.int32))
    np.testing.assert_allclose(stops, [0.05, 0.1, 0.1, 1.0])


@pytest.mark.parametrize(
    "choice",
    [
        VerifyChoice(9, 0.5, "cold"),  # survivals have not been seen yet
        VerifyChoice(9, 0.5, "algorithm1"),  # decided on the present blocks
        VerifyChoice(0, 1.0, "lagged"),  # nothing is verified: there is no price
        VerifyChoice(9, 1e-6, "lagged"),  # every slot is
        VerifyChoice(9, 0.0, "static_length", 3),  # none goes by its survival
    ],
)
def test_without_a_price_to_go_by_blocks_are_whole(choice: VerifyChoice) -> None:
    assert not stop_survivals(choice, 0.25, ALIKE).any()


def test_a_rank_asks_by_the_price_of_the_step_before() -> None:
    session = serve(Priced(0.2), num_requests=1)
    stops = [stop for *_, stop in asked(session)]
    assert stops[0] == 0.0  # behind the prompt: no step had a block to decide on
    assert len(stops) > 4 and set(stops[1:]) == {np.float32(0.05)}


def test_a_budget_that_is_here_already_is_asked_by_first() -> None:
    session = Session(make_rank(Priced(0.2), gamma=GAMMA, stop_share=0.25))
    session.submit(admitted("a", [3, 1, 4], 40))
    for _ in range(3):
        session.step()
    step = session.decisions[-1].step
    session.rank.on_message(
        VerifyBudget(RANK.name, RANK.epoch, step - 1, step + 1, step + 3, 9, 0.4), 0.0
    )
    session.step()  # decided by the budget; so is the next one
    assert [stop for *_, stop in asked(session)][-1] == np.float32(0.1)


def test_no_share_means_whole_blocks() -> None:
    session = serve(Priced(0.2), stop_share=0.0)
    assert {stop for *_, stop in asked(session)} == {0.0}
    assert session.rank.counters.num_undrafted == 0


def test_what_a_class_verifies_whatever_it_is_worth_is_drafted_whole() -> None:
    session = Session(make_rank(Priced(0.2), gamma=GAMMA, stop_share=0.25))
    classes = ServiceClass("forced", min_verify_len=3), ServiceClass("other")
    session.rank.decider._classes = ClassAllocation(classes)
    for name in "ab":
        session.submit(replace(admitted(name, [3, 1, 4], 30), class_id=int(name == "b")))
    session.run()
    by_name = {n: {s for name, _, s in asked(session) if name == n} for n in "ab"}
    assert by_name["a"] == {0.0}
    assert np.float32(0.05) in by_name["b"]


class Remembers(RankCalibration):
    """Notes which rounds were explored."""

    explored: dict[int, Mask]

    def explore(self, drafted: Drafted, committed_len: Any, caps: Any, room: int) -> Mask:
        chosen = super().explore(drafted, committed_len, caps, room)
        for stream, length, has, is_explored in zip(
            drafted.streams.tolist(), committed_len.tolist(), drafted.teaches, chosen, strict=True
        ):
            if has:
                self.explored[stream, length] = bool(is_explored)  # type: ignore[index]
        return chosen


def test_the_rounds_that_will_be_explored_are_foretold_and_asked_for_whole() -> None:
    calibration = Remembers(GAMMA, CalibrationConfig(explore_share=0.2), "static_threshold")
    calibration.explored = {}
    # Room for everybody: a round that is drawn is explored.
    session = Session(
        make_rank(
            Priced(0.2), gamma=GAMMA, stop_share=0.25, calibration=calibration, max_batch_tokens=99
        )
    )
    keys = {}
    for i in range(8):
        session.submit(admitted(str(i), [3 + i, 1, 4], 60))
    while (plan := session.step()) is not None:
        table = session.rank.book.table
        keys |= {r.request_id: int(table.stream_key[r.slot]) for r in table.requests if r}
        assert plan.num_requests
    told = {(keys[name], length): stop for name, length, stop in asked(session)}
    first = {(keys[name], length) for name, length, _ in asked(session) if length == 4}
    both = [key for key in calibration.explored if key in told and key not in first]
    assert len(both) > 100
    assert sum(calibration.explored[key] for key in both) > 10
    for key in both:
        assert (told[key] == 0.0) == calibration.explored[key]


def test_a_request_with_rules_is_not_explored_and_so_not_drafted_whole() -> None:
    calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged")
    calibration._share = 1.0
    session = Session(make_rank(Priced(0.2), gamma=GAMMA, stop_share=0.25))
    session.submit(admitted("a", [3, 1, 4], 30))
    session.step()
    table = session.rank.book.table
    slots = np.flatnonzero(table.is_running)
    assert calibration.foretell(table, slots).all()
    table.has_rules[slots] = True
    assert not calibration.foretell(table, slots).any()
