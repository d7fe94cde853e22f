"""How far blocks are drafted: what a rank asks for, when it asks for whole blocks, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.core.draft_stop import LEAST_DRAFTED, stop_survivals
from actors.core.messages import CommitBatch, ProposalBatch, VerifyBudget
from actors.core.prefix_scheduler import allocate
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.round_decision import decide_with_explored, within_drafted
from actors.core.row_table import Mask
from actors.core.service_class import ClassAllocation, ServiceClass
from actors.core.verify_decision import StepFacts, VerifyChoice, VerifyDecider
from configs.calibration import CalibrationConfig
from tests.pure.rank_harness import Session, admitted, make_rank, prefilled, proposal_for
from tests.pure.scripted_drafter import RANK, oracle

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


# --- what becomes of what was not drafted ----------------------------------------------------------------------------


@pytest.mark.parametrize("price", [0.0, 0.05, 0.3, 0.9])
def test_the_text_is_the_same_with_stopping_and_without(price: float) -> None:
    for share in (0.0, 0.25, 1.0):
        session = serve(Priced(price), stop_share=share)
        for i in range(3):
            tokens, reason = oracle([3 + i, 1, 4], 24)
            assert (session.streams[str(i)].tokens, session.streams[str(i)].reason) == (
                tokens,
                reason,
            )
        assert (session.rank.counters.num_undrafted > 0) == (price > 0 and share > 0)


def test_slots_that_were_not_drafted_are_neither_proposed_nor_verified_nor_trimmed() -> None:
    session = serve(Priced(0.3), stop_share=1.0)
    counters = session.rank.counters
    acceptance = counters.acceptance
    assert (acceptance.proposed >= acceptance.scheduled).all()
    np.testing.assert_array_equal(acceptance.trimmed + acceptance.scheduled, acceptance.proposed)
    num_blocks = sum(int(d.has_draft.sum()) for d in session.decisions)
    assert counters.num_undrafted == num_blocks * GAMMA - acceptance.proposed.sum() > 0
    for decision in session.decisions:
        assert (decision.verify_len <= decision.proposed_len).all()
        beyond = np.arange(GAMMA) >= decision.proposed_len[:, None]
        assert not decision.survivals[beyond].any()
    streams = [session.streams[str(i)].last for i in range(3)]
    assert sum(last.num_proposed for last in streams if last) == acceptance.proposed.sum()


def test_the_first_slots_are_always_drafted() -> None:
    session = serve(Priced(1.0), stop_share=1.0)
    lens = np.concatenate([d.proposed_len[d.has_draft] for d in session.decisions])
    assert lens.min() == LEAST_DRAFTED < lens.max()


def stopped_at(session: Session, commit: CommitBatch, length: int) -> ProposalBatch:
    proposal = proposal_for(session, commit)
    confidences = np.where(np.arange(proposal.confidences.shape[1]) < length, 0.9, 0.0)
    return replace(
        proposal,
        confidences=np.broadcast_to(confidences, proposal.confidences.shape).astype(np.float32),
        draft_lens=np.full(len(proposal.request_ids), length, np.int32),
    )


def test_a_policy_that_takes_any_survival_does_not_verify_past_the_stop() -> None:
    session, commit = prefilled(gamma=GAMMA, stop_share=0.25)  # its policy verifies all there is
    session.rank.on_message(stopped_at(session, commit, 3), session.now)
    session.step()
    decision = session.decisions[-1]
    assert decision.verify_len.tolist() == decision.proposed_len.tolist() == [3]
    assert decision.cut_by(0) == "undrafted"


def test_confidences_behind_the_stop_count_for_nothing() -> None:
    session, commit = prefilled(gamma=GAMMA, stop_share=0.25)
    session.rank.calibration = RankCalibration(GAMMA, CalibrationConfig(), "static_threshold")
    session.rank.calibration._shifts[:] = 8.0  # whatever a drafter says is believed to be certain
    session.rank.on_message(stopped_at(session, commit, 2), session.now)
    session.step()
    survivals = session.decisions[-1].survivals[0]
    assert survivals[1] > 0.99 and not survivals[2:].any()


@pytest.mark.parametrize("lens", [[-1], [GAMMA + 1], [1, 1]])
def test_lengths_that_cannot_be_are_dropped(lens: list[int]) -> None:
    session, commit = prefilled(gamma=GAMMA)
    proposal = replace(proposal_for(session, commit), draft_lens=np.array(lens, np.int32))
    session.rank.on_message(proposal, session.now)
    assert session.rank.book.drafts.dropped["malformed"] == 1


def test_an_explored_round_stops_where_its_block_does_and_leaves_the_others_what_they_had() -> None:
    """Room is set aside by what could have been drafted: where a block stops is its own tokens' doing (C3)."""
    rows = 2
    survival = np.array([[0.9, 0.8, 0.0, 0.0], [0.9, 0.8, 0.7, 0.6]], np.float32)
    found = []
    for drafted_len in ([2, 4], [4, 4]):
        decider = VerifyDecider(RANK.name, RANK.epoch, Priced(0.5), allocate)
        decision = decide_with_explored(
            decider,
            np.array([True, False]),
            step=9,
            request_ids=("a", "b"),
            survivals=survival,
            caps=np.full(rows, 4, np.int32),
            has_draft=np.ones(rows, np.bool_),
            room=6,
            num_prefill_tokens=0,
            context_tokens=0,
        )
        found.append(within_drafted(decision, np.array(drafted_len, np.int32)))
    stopped, whole = found
    assert stopped.verify_len.tolist() == [2, 1] and whole.verify_len.tolist() == [4, 1]
    assert stopped.planned_len is not None and stopped.planned_len.tolist() == [1, 1]


def test_what_was_never_drafted_teaches_nothing() -> None:
    learned: list[tuple[int, int]] = []

    class Learns(RankCalibration):
        def learn(
            self, drafted: Drafted, planned_len: Any, verify_len: Any, *rest: Any
        ) -> list[str]:
            lens = (drafted.confidences > 0).sum(axis=1)
            learned.extend(zip(verify_len.tolist(), lens.tolist(), strict=True))
            return super().learn(drafted, planned_len, verify_len, *rest)

    config = CalibrationConfig(explore_share=0.2)
    session = Session(
        make_rank(
            Priced(0.3),
            gamma=GAMMA,
            stop_share=1.0,
            calibration=Learns(GAMMA, config, "static_threshold", stops=True),
        )
    )
    for i in range(4):
        session.submit(admitted(str(i), [3 + i, 1, 4], 40))
    session.run()
    assert any(0 < lens < GAMMA for _, lens in learned)
    assert all(verified <= lens for verified, lens in learned if verified)


def test_the_alarm_watches_confidences_that_every_block_has() -> None:
    """Prices that come and go censor what comes late in a block: that is no change of the traffic."""
    rng = np.random.default_rng(0)

    def alarms(stops: bool) -> int:
        calibration = RankCalibration(GAMMA, CalibrationConfig(), "lagged", stops=stops)
        for step in range(400):
            logits = rng.normal(0.5, 0.6, (8, GAMMA))
            confidences = (1 / (1 + np.exp(-logits))).astype(np.float32)
            accepted = np.logical_and.accumulate(rng.random((8, GAMMA)) < confidences, axis=1)
            drafted_len = np.full(8, LEAST_DRAFTED if step >= 200 else GAMMA, np.int32)
            confidences[np.arange(GAMMA) >= drafted_len[:, None]] = 0.0
            streams = np.arange(8, dtype=np.uint64) + np.uint64(step // 20 * 8)
            drafted = Drafted(confidences, np.zeros(8, np.int8), streams, np.ones(8, np.bool_))
            num_accepted = np.minimum(accepted.sum(axis=1), drafted_len).astype(np.int32)
            calibration.learn(drafted, drafted_len, drafted_len, num_accepted, num_accepted + 1)
        return calibration.num_alarms

    assert alarms(stops=True) == 0
    assert alarms(stops=False) > 0  # what it would have taken for other traffic
