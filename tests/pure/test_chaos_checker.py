"""The checker of `dspark chaos` finds what it must: every kind of broken history, and nothing in a sound one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.chaos.checker import Verdict, check
from cluster.chaos.comparison import Difference, compare
from cluster.chaos.history import Event, parse_history
from cluster.chaos.report import report, text

TOKENS = [5, 9, 2, 7, 7, 1, 30, 4, 8, 6]


def stream(
    name: str, begin_s: float, request: int = 0, how: str = "complete", **end: Any
) -> list[Event]:
    """A stream of three chunks, one a second, that starts after a second."""
    told = {"completion_tokens": len(TOKENS)} if how == "complete" else {}
    return [
        _at(begin_s, "open", stream=name, request=request, chain=name.partition(".")[0]),
        _at(begin_s + 1, "tokens", stream=name, token_ids=TOKENS[:4]),
        _at(begin_s + 2, "tokens", stream=name, token_ids=TOKENS[4:5]),
        _at(begin_s + 3, "tokens", stream=name, token_ids=TOKENS[5:]),
        _at(begin_s + 3, "end", stream=name, how=how, **told, **end),
    ]


def _at(at_s: float, event: str, **about: Any) -> Event:
    return {"at_s": at_s, "event": event, **about}


def fault(number: int, kind: str, at_s: float, recovered_s: float | None = None) -> list[Event]:
    struck = [_at(at_s, "fault", fault=number, kind=kind, victim="x")]
    return struck + ([_at(recovered_s, "recovered", fault=number)] if recovered_s else [])


def history(*parts: list[Event]) -> list[Event]:
    first = [
        _at(0, "run", kinds=["rank", "ingress"], kills=1),
        _at(0, "expected", request=0, token_ids=TOKENS),
    ]
    events = sorted((event for part in parts for event in part), key=lambda event: event["at_s"])
    return [*first, *events, _at(90, "over")]


def sound() -> list[Event]:
    """A rank dies while two streams run; later an ingress replica, and the client asks again."""
    return history(
        stream("c0.0", 1),
        stream("c1.0", 2.5),
        fault(0, "rank", 2.2, 7.2),
        fault(1, "ingress", 20, 23),
        [
            _at(19, "open", stream="c2.0", request=0, chain="c2"),
            _at(19.5, "tokens", stream="c2.0", token_ids=TOKENS[:3]),
            _at(20.1, "end", stream="c2.0", how="broken", detail="ReadError"),
        ],
        stream("c2.1", 24),
        [
            _at(30, "open", stream="c3.0", request=0, chain="c3"),
            _at(30, "end", stream="c3.0", how="refused", detail="503", retry_after_s=1.0),
        ],
        stream("c3.1", 31),
    )


def failed(verdict: Verdict) -> str:
    """The kinds under which a violation was counted."""
    return " ".join(kind for kind, tally in verdict.by_kind.items() if not tally.is_clean)


def test_a_sound_history_passes_and_is_counted_by_kind() -> None:
    verdict = check(sound())
    assert verdict.is_clean and not verdict.problems
    told = report(verdict)
    assert (told["kills"], told["asked"], told["streams"], told["retryable_errors"]) == (2, 2, 6, 2)
    rank = told["by_kind"]["rank"]
    assert (rank["kills"], rank["streams"], rank["failed_streams"]) == (1, 2, 0)
    assert rank["recovery_s"] == {"median": 5.0, "max": 5.0}
    assert rank["pause_s"] == {"median": 0.8, "max": 0.8}  # c0.0 waits from 2.2 to 3
    assert told["by_kind"]["none"]["streams"] == 3  # c2.1 and c3
    assert text(told, ["h.jsonl"]).splitlines()[-1].startswith("PASS: 2 faults, 6 streams, 0 fail")


Edit = Callable[[list[Event]], Any]


def of(events: list[Event], name: str, event: str, index: int = 0) -> Event:
    return [e for e in events if e["event"] == event and e.get("stream") == name][index]


def chunk(events: list[Event], index: int) -> list[int]:
    ids: list[int] = of(events, "c0.0", "tokens", index)["token_ids"]
    return ids


def swap(events: list[Event]) -> None:
    first, second = chunk(events, 0), chunk(events, 2)
    first[1], second[3] = second[3], first[1]


def drop_end(events: list[Event], name: str = "c0.0") -> None:
    events.remove(of(events, name, "end"))


def late_token(events: list[Event]) -> None:
    events.append(_at(80, "tokens", stream="c0.0", token_ids=[]))


def ends(name: str, **end: Any) -> Edit:
    return lambda events: of(events, name, "end").update(end)


MUTANTS: dict[str, tuple[Edit, str]] = {
    "a lost token": (lambda h: chunk(h, 0).pop(2), "rank"),
    "a lost chunk": (lambda h: h.remove(of(h, "c0.0", "tokens", 2)), "rank"),
    "a repeated token": (lambda h: chunk(h, 0).append(TOKENS[3]), "rank"),
    "a repeated chunk": (lambda h: h.insert(h.index(of(h, "c0.0", "tokens", 1)),
                                            copy.deepcopy(of(h, "c0.0", "tokens", 0))), "rank"),
    "a changed token": (lambda h: chunk(h, 2).__setitem__(0, 77), "rank"),
    "reordered tokens": (swap, "rank"),
    "a stream that never ends": (drop_end, "rank"),
    "a silent cut": (ends("c0.0", how="cut"), "rank"),
    "an error event": (ends("c0.0", how="error", detail="stream_lost"), "rank"),
    "a broken connection without an ingress death": (ends("c0.0", how="broken"), "rank"),
    "usage that counts other tokens": (ends("c0.0", completion_tokens=9), "rank"),
    "an ingress death that nobody would retry": (ends("c2.0", how="status", status=400), "ingress"),
    "an ingress death that cuts in silence": (ends("c2.0", how="cut"), "ingress"),
    "changed tokens before an ingress death": (
        lambda h: of(h, "c2.0", "tokens")["token_ids"].__setitem__(0, 6), "ingress"),
    "a refusal that names no time": (ends("c3.0", retry_after_s=None), "none"),
    "a bare 503 without an ingress death": (ends("c3.0", how="status", status=503), "none"),
    "a refusal after the first token": (
        lambda h: h.insert(h.index(of(h, "c3.0", "end")),
                           _at(30, "tokens", stream="c3.0", token_ids=TOKENS[:1])), "none"),
    "a retry that is refused for ever": (
        lambda h: [h.remove(e) for e in list(h) if e.get("stream") == "c3.1"], "none"),
    "a token after the end": (late_token, "rank"),
    "a fault that nothing recovered from": (
        lambda h: h.remove(next(e for e in h if e["event"] == "recovered")), "rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_every_broken_history_is_found_under_its_kind(name: str) -> None:
    edit, kind = MUTANTS[name]
    events = sound()
    edit(events)
    verdict = check(events)
    assert not verdict.is_clean and verdict.problems
    assert kind in failed(verdict).split()
    assert text(report(verdict), []).splitlines()[-1].startswith("FAIL")


def test_what_is_left_behind_and_a_storm_that_broke_off_are_violations() -> None:
    leaking = [*sound()[:-1], _at(89, "leak", what="target-0: 3 of 9 KV blocks are free")]
    assert not check([*leaking, _at(90, "over")]).is_clean
    assert check(leaking).num_leaks == 1
    assert not check(sound()[:-1]).is_clean


def test_a_storm_of_which_a_kind_never_struck_proves_nothing() -> None:
    calm = [e for e in sound() if e.get("fault") != 0]  # the rank's
    verdict = check(calm)
    assert not verdict.is_clean and not verdict.problems
    said = text(report(verdict), [])
    assert "never struck, raise --seconds: rank" in said and "FAIL" in said


def test_a_client_that_hung_up_is_judged_by_what_it_got() -> None:
    events = sound()
    of(events, "c0.0", "end").update(how="aborted")
    events.remove(of(events, "c0.0", "tokens", 2))
    assert check(events).is_clean
    chunk(events, 1)[0] = 99
    verdict = check(events)
    assert verdict.total.difference == Difference(num_changed=1)


def test_what_went_wrong_is_named() -> None:
    assert compare(TOKENS, [*TOKENS[:3], *TOKENS[5:]], is_whole=True) == Difference(num_lost=2)
    repeated = [*TOKENS[:6], *TOKENS[2:6], *TOKENS[6:]]
    assert compare(TOKENS, repeated, is_whole=True) == Difference(num_repeated=4)
    assert compare(TOKENS, [*TOKENS[:9], 99], is_whole=True) == Difference(num_changed=1)
    assert compare(TOKENS, TOKENS[:4], is_whole=True) == Difference(num_lost=6)
    assert not compare(TOKENS, TOKENS[:4], is_whole=False)
    assert compare(TOKENS, TOKENS[1:4], is_whole=False) == Difference(num_lost=1)


@given(
    st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.booleans()
)  # fmt: skip
def test_no_difference_goes_unnoticed(expected: list[int], got: list[int], is_whole: bool) -> None:
    is_right = got == (expected if is_whole else expected[: len(got)])
    assert bool(compare(expected, got, is_whole=is_whole)) is not is_right


def test_verdicts_on_several_histories_add_up() -> None:
    broken = sound()
    chunk(broken, 0).pop()
    verdict = check(sound())
    verdict.add(check(broken))
    told = report(verdict)
    assert not verdict.is_clean
    assert (told["kills"], told["streams"], told["lost_tokens"]) == (4, 12, 1)
    assert told["by_kind"]["rank"]["kills"] == 2


def test_a_kept_history_reads_back_and_a_broken_file_says_where() -> None:
    lines = [json.dumps(event) for event in sound()]
    assert check(parse_history(lines)).is_clean
    lines[3] = lines[3][:-5]
    with pytest.raises(ValueError, match="line 4 is no event"):
        parse_history(lines)
