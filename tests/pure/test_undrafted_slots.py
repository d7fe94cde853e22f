"""What becomes of slots that were not drafted: nothing, in every count and decision of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.core.draft_stop import LEAST_DRAFTED
from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.prefix_scheduler import allocate
from actors.core.rank_calibration import Drafted, RankCalibration
from actors.core.round_decision import decide_with_explored, within_drafted
from actors.core.verify_decision import VerifyDecider
from configs.calibration import CalibrationConfig
from tests.pure.rank_harness import Session, admitted, make_rank, prefilled, proposal_for
from tests.pure.scripted_drafter import RANK, oracle
from tests.pure.test_draft_stop import GAMMA, Priced, serve


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
