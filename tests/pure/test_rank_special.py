"""What an engine says of special rows reaches the right stream: log probabilities beside tokens, errors alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.core.layout import StepPlan, StepResult
from actors.core.logit_rules import LogitRules, LogprobsOrder, TokenLogprobs
from actors.core.messages import AbortRequest
from actors.core.sampling import SamplingParams
from tests.pure.rank_harness import ScriptedTarget, Session, admitted, make_rank
from tests.pure.scripted_drafter import VOCAB

ASKS = SamplingParams(temperature=0.0, logprobs=LogprobsOrder(1))
GUIDED = SamplingParams(temperature=0.0, rules=LogitRules(grammar="x"))


class TellingTarget(ScriptedTarget):
    """Log probability of a token: minus its id. A request with a grammar fails in step `fails_at` of its output."""

    fails_at = 0

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        logprobs, errors = {}, {}
        for special in plan.special:
            row = special.row
            end = int(plan.cu_query_len[row + 1]) - int(plan.verify_len[row])
            accepted = plan.token_ids[end : end + int(result.num_accepted[row])].tolist()
            run = [*accepted, int(result.next_token[row])]
            if special.sampling.logprobs is not None:
                logprobs[row] = tuple(TokenLogprobs(-float(token)) for token in run)
            elif special.num_output >= self.fails_at:
                errors[row] = "the output has left the grammar"
        return replace(result, logprobs=logprobs, errors=errors)


def session_of(gamma: int = 3) -> Session:
    rank = make_rank(gamma=gamma)
    return Session(rank, error=0.2, target=TellingTarget(rank))


def test_log_probabilities_are_cut_where_their_tokens_are() -> None:
    plain = session_of()
    plain.submit(admitted("a", [3, 1, 4], 20))
    plain.run()
    text = plain.streams["a"].tokens
    for stop in sorted(set(text)):
        session = session_of()
        session.submit(replace(admitted("a", [3, 1, 4], 20, stops=(stop,)), sampling=ASKS))
        session.submit(admitted("b", [2, 7], 9))
        session.run()
        stream = session.streams["a"]
        assert stream.tokens == text[: text.index(stop) + 1]
        assert [entry.logprob for entry in stream.logprobs] == [-float(t) for t in stream.tokens]
        assert session.streams["b"].logprobs == []


@pytest.mark.parametrize("fails_at", [0, 1, 4])
@pytest.mark.parametrize("gamma", [0, 3])
def test_a_row_that_cannot_go_on_ends_alone_and_gives_everything_back(
    gamma: int, fails_at: int
) -> None:
    session = session_of(gamma)
    session.target.fails_at = fails_at
    session.submit(replace(admitted("bad", [3, 1, 4], 20), sampling=GUIDED))
    session.submit(admitted("good", [2, 7], 12))
    session.run()
    bad, good = session.streams["bad"], session.streams["good"]
    assert bad.reason == "error" and bad.last is not None and "left the grammar" in bad.last.error
    assert fails_at <= len(bad.tokens) <= fails_at + gamma + 1
    assert good.reason == "length" and len(good.tokens) == 12
    counters = session.rank.counters
    assert (counters.num_failed, counters.num_finished) == (1, 1)
    # Rounds that failed are no rounds: what was committed is what the streams got, the first tokens aside.
    first_tokens = 1 + (fails_at > 0)
    rounds = counters.acceptance.num_committed
    assert rounds == len(bad.tokens) + len(good.tokens) - first_tokens
    assert session.rank.check_idle() == []


def test_a_request_aborted_in_the_step_that_fails_it_ends_once() -> None:
    session = session_of()
    session.submit(replace(admitted("bad", [3, 1, 4], 20), sampling=GUIDED))
    plan = session.rank.plan_step(session.now)
    assert plan is not None
    result = session.target.step(plan)
    assert result.errors
    session.deliver(session.rank.on_message(AbortRequest("bad", 0), session.now))
    session.deliver(session.rank.apply(plan, result, session.now, 0.01))
    assert session.streams["bad"].reason == "abort"
    assert session.rank.counters.num_failed == 0 and session.rank.check_idle() == []


@pytest.mark.parametrize("bias", [VOCAB - 1, VOCAB])
def test_an_id_outside_the_vocabulary_is_refused_before_it_can_fail_a_step(bias: int) -> None:
    sampling = SamplingParams(temperature=0.0, rules=LogitRules(logit_bias=((bias, 1.0),)))
    session = session_of()
    session.submit(replace(admitted("a", [3, 1], 2), sampling=sampling))
    if bias < VOCAB:
        assert session.step() is not None
        return
    last = session.streams["a"].last
    assert last is not None and "logit_bias" in last.error
    assert session.rank.check_idle() == []
