"""A rank is ready when it has served a token, and idle when everything is back."""

from __future__ import annotations

import pytest

from actors.core.idle_checks import IdleChecks
from actors.core.messages import Endpoint, TokenDelta, TokenDeltas
from actors.core.proof import PROOF_ID, ProofError, proof_request, require_token
from tests.pure.rank_harness import Session, make_rank
from tests.pure.scripted_drafter import RANK


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
