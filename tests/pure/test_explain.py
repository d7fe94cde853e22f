"""Every round of a request can be told apart, with the reason of its cut, while it runs and a while after (C11)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from actors.core import explain
from actors.core.explain import LogShelf, Round, explanation, is_part_of
from actors.core.messages import AbortRequest, AdmittedRequest, VerifyBudget
from actors.core.step_decision import StepDecision, VerifyChoice
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER, RANK

PROMPT = [3, 1, 4, 1, 5]


def asking(request_id: str, prompt: list[int], max_new: int, **more: object) -> AdmittedRequest:
    return replace(admitted(request_id, prompt, max_new, **more), explain=True)  # type: ignore[arg-type]


def rounds(session: Session, request_id: str) -> list[Round]:
    (log,) = session.rank.book.logs.find(request_id)
    return list(log.rounds)


def test_rounds_tell_the_whole_stream_and_nobody_elses() -> None:
    session = Session(make_rank(), error=0.4)
    session.submit(asking("a", PROMPT, 30))
    session.submit(asking("b", [9, 2], 20))
    session.submit(admitted("c", [7], 25))
    session.run()
    for name, length in (("a", 30), ("b", 20)):
        (log,) = session.rank.book.logs.find(name)
        stream = session.streams[name]
        assert stream.last is not None and log.num_rounds == stream.last.num_rounds
        assert sum(r.num_scheduled for r in log.rounds) == stream.last.num_scheduled
        assert sum(r.num_proposed for r in log.rounds) == stream.last.num_proposed
        place = 1  # the first token comes from the prompt's own step, which is no round
        for each in log.rounds:
            assert each.first_index == place
            assert each.num_accepted <= each.num_scheduled <= each.num_proposed
            place += each.num_committed
        assert place == length
    assert {r.num_requests for r in rounds(session, "a")} == {1, 2, 3}
    assert not session.rank.book.logs.find("c"), "nobody asked for it"


def test_an_entry_carries_budget_and_survivals_and_is_json() -> None:
    session = Session(make_rank(), error=0.0)
    budget = VerifyBudget(RANK.name, RANK.epoch, 0, 2, 500, 2, 0.125, "lagged")
    session.rank.on_message(budget, 0.0)
    session.submit(asking("a", PROMPT, 20))
    session.run()
    told = json.loads(json.dumps(session.rank.book.explain("a")))
    assert told["is_known"]
    (log,) = told["logs"]
    assert (log["request_id"], log["generation"], log["has_ended"]) == ("a", 0, True)
    under_budget = [r for r in log["rounds"] if r["rule"] == "lagged" and r["num_scheduled"] == 2]
    assert under_budget
    for each in under_budget:
        assert (each["max_draft_tokens"], each["min_survival"]) == (2, 0.125)
        assert len(each["survivals"]) == 3 and each["cut_by"] in ("budget", "length")
        assert each["survivals"] == sorted(each["survivals"], reverse=True)


def test_no_block_has_a_reason_each() -> None:
    session = Session(make_rank(max_wait_s=0.0), error=0.0)
    session.submit(asking("quiet", [1, 2], 4, speculation=False))
    session.submit(asking("short", [5], 2))
    session.submit(asking("late", [8, 9], 12))
    for _ in range(3):
        session.step(drafts=False)
    session.rank.set_drafters([])
    session.run()
    assert {r.cut_by for r in rounds(session, "quiet")} == {"off"}
    assert [r.cut_by for r in rounds(session, "short")] == ["length"]
    reasons = [r.cut_by for r in rounds(session, "late")]
    assert reasons[0] == "late" and reasons[-2:] == ["fallback", "length"]


def test_with_policy_none_speculation_is_off_not_missing() -> None:
    from actors.core.local_policy import LocalPolicy

    for drafters in ([DRAFTER], []):
        session = Session(make_rank(LocalPolicy("none")))
        session.rank.set_drafters(drafters)
        session.submit(asking("a", [3, 1], 6))
        session.run()
        assert {(r.cut_by, r.rule) for r in rounds(session, "a")} == {("off", "none")}


def decision(rule: str, survivals: list[float], verify_len: int) -> StepDecision:
    return StepDecision(
        step=5,
        request_ids=("a",),
        survivals=np.array([survivals], np.float32),
        caps=np.full(1, 3, np.int32),
        has_draft=np.ones(1, np.bool_),
        verify_len=np.array([verify_len], np.int32),
        choice=VerifyChoice(99, 0.5, rule),
        room=100,
    )


def test_the_price_of_a_cold_rank_is_called_cold() -> None:
    assert decision("cold", [0.9, 0.2, 0.1], 1).cut_by(0) == "cold"
    assert decision("lagged", [0.9, 0.2, 0.1], 1).cut_by(0) == "price"
    assert decision("cold", [0.9, 0.8, 0.7], 3).cut_by(0) == "none"


# --- how long, and how much -----------------------------------------------------------------------------------------


def test_only_the_newest_rounds_of_a_request_are_kept_and_all_are_counted() -> None:
    session = Session(make_rank(explain_rounds=4), error=0.9)
    session.submit(admitted("a", PROMPT, 40))
    session.run()
    (log,) = session.rank.book.logs.find("a")
    assert len(log.rounds) == 4 < log.num_rounds
    last = log.rounds[-1]
    assert last.first_index + last.num_committed == 40


def test_a_request_that_asks_gets_its_rounds_although_the_configuration_keeps_fewer() -> None:
    session = Session(make_rank(explain_rounds=2), error=0.9)
    session.submit(asking("a", PROMPT, 30))
    session.run()
    (log,) = session.rank.book.logs.find("a")
    assert len(log.rounds) == log.num_rounds > 2


def test_a_log_outlives_its_request_until_newer_ones_need_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain, "KEPT_ENDED_ROUNDS", 30)
    session = Session(make_rank(explain_rounds=8), error=0.9)
    for name in "abcdef":
        session.submit(admitted(name, PROMPT, 20))
        session.run()
    logs = session.rank.book.logs
    assert [name for name in "abcdef" if logs.find(name)] == ["d", "e", "f"]
    monkeypatch.setattr(explain, "KEPT_ENDED_LOGS", 1)
    session.submit(admitted("g", PROMPT, 20))
    session.run()
    assert [name for name in "defg" if logs.find(name)] == ["g"]


def test_a_log_does_not_hold_on_to_the_arrays_of_its_step() -> None:
    session = Session(make_rank(explain_rounds=8))
    session.submit(admitted("a", PROMPT, 8))
    session.run()
    assert all(r.survivals.base is None for r in rounds(session, "a"))


def test_an_aborted_request_is_told_as_far_as_it_came() -> None:
    session = Session(make_rank(explain_rounds=8))
    session.submit(admitted("a", PROMPT, 50))
    for _ in range(4):
        session.step()
    assert not session.rank.book.logs.find("a")[0].has_ended
    session.deliver(session.rank.on_message(AbortRequest("a", 0), session.now))
    (log,) = session.rank.book.logs.find("a")
    assert log.has_ended and log.num_rounds == 3
    assert session.rank.check_idle() == []


def test_generations_are_told_apart_and_a_later_one_starts_where_the_stream_was() -> None:
    session = Session(make_rank(explain_rounds=8))
    session.submit(admitted("a", PROMPT, 50))
    for _ in range(3):
        session.step()
    held = list(session.streams["a"].tokens)
    again = admitted("a", PROMPT + held, 50, num_prior=len(held), generation=1)
    session.submit(again)
    session.run()
    old, new = session.rank.book.logs.find("a")
    assert (old.generation, new.generation) == (0, 1)
    assert old.has_ended and new.first_index == len(held)
    assert new.rounds[0].first_index >= len(held)


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "response_id", "is_part"),
    [
        ("cmpl-ab", "cmpl-ab", True),
        ("cmpl-ab-0", "cmpl-ab", True),
        ("cmpl-ab-127", "cmpl-ab", True),
        ("cmpl-ab", "cmpl", False),
        ("cmpl-123456", "cmpl", False),
        ("cmpl-ab-0", "cmpl-ab-0", True),
        ("cmpl-abc-0", "cmpl-ab", False),
        ("cmpl-ab", "", False),
    ],
)
def test_a_response_is_its_request_or_all_its_prompts(
    request_id: str, response_id: str, is_part: bool
) -> None:
    assert is_part_of(request_id, response_id) == is_part


def test_a_request_that_kept_nothing_is_known_and_a_stranger_is_not() -> None:
    session = Session(make_rank())
    session.submit(admitted("a-0", PROMPT, 5))
    assert session.rank.book.explain("a") == {"is_known": True, "logs": []}
    session.run()
    assert session.rank.book.explain("a") == {"is_known": True, "logs": []}
    assert session.rank.book.explain("z") == {"is_known": False, "logs": []}
    assert explanation([], [], "a")["is_known"] is False


def test_nothing_is_kept_unless_somebody_asks() -> None:
    assert LogShelf().open(admitted("a", PROMPT, 5)) is None
