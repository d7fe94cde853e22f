"""A rank is ready when it has served a token, idle when everything is back, and gives up its requests cleanly."""

from __future__ import annotations

import pytest

from actors.core.idle_checks import IdleChecks
from actors.core.messages import Endpoint, TokenDelta, TokenDeltas
from actors.core.proof import PROOF_ID, ProofError, proof_request, require_token
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import INGRESS, RANK

PROMPT = [3, 1, 4, 1, 5]


def answer(*tokens: int, reason: str = "length", error: str = "") -> TokenDeltas:
    delta = TokenDelta(PROOF_ID, 0, 0, tokens, reason, error=error)  # type: ignore[arg-type]
    return TokenDeltas("target-0", "e", 1, (delta,))


def test_a_rank_serves_the_proof_in_one_step_and_keeps_nothing_of_it() -> None:
    session = Session(make_rank())
    request = proof_request(RANK)
    assert session.rank.on_message(request, 0.0) == []
    plan = session.step()
    assert plan is not None and plan.num_requests == 1
    assert session.rank.is_idle and session.rank.check_idle() == []


def test_a_token_is_the_proof_and_an_error_is_told() -> None:
    require_token(answer(5))
    with pytest.raises(ProofError, match="on fire"):
        require_token(answer(reason="error", error="on fire"))
    with pytest.raises(ProofError, match="abort"):
        require_token(answer(reason="abort"))


def test_the_proof_asks_for_one_greedy_token_of_whoever_answers() -> None:
    rank = Endpoint("target-3", "target", "tcp://x", "k", "e")
    request = proof_request(rank)
    assert request.reply_to == rank and request.max_new_tokens == 1
    assert request.sampling.temperature == 0


def test_an_idle_rank_is_checked_once_after_it_was_busy() -> None:
    checks, rank = IdleChecks(), make_rank()
    assert checks.look(rank) == () and checks.num_checks == 0
    lease = rank.book.pool.lease(2)
    checks.note_step()
    found = checks.look(rank)
    assert "leases are open" in found[0] and checks.look(rank) == ()
    assert checks.stats() == {
        "num_idle_checks": 1,
        "num_idle_problems": 1,
        "idle_problems": list(found),
    }
    assert lease is not None
    lease.release()
    checks.note_step()
    assert checks.look(rank) == () and checks.problems == () and checks.num_problems == 1


def test_requests_that_are_given_up_leave_nothing_and_go_on_elsewhere_from_their_last_token() -> (
    None
):
    session = Session(make_rank())
    for name in "abc":
        session.submit(admitted(name, PROMPT, 40))
    for _ in range(4):
        session.step()
    held = {name: list(session.streams[name].tokens) for name in "abc"}
    ((ingress, message),) = [
        sent for sent in session.rank.give_up("drained") if isinstance(sent[1], TokenDeltas)
    ]
    assert ingress == INGRESS and isinstance(message, TokenDeltas)
    assert {d.request_id: d.first_index for d in message.deltas} == {
        name: len(tokens) for name, tokens in held.items()
    }
    assert {(d.finish_reason, d.error, d.token_ids) for d in message.deltas} == {
        ("abort", "drained", ())
    }
    assert session.rank.is_idle and session.rank.check_idle() == []
    assert session.rank.give_up("drained") == []
