"""The journal takes only what continues a stream; stop strings do not depend on how the text was cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.core.logit_rules import LogprobsOrder, TokenLogprobs
from actors.core.messages import Endpoint, TokenDelta
from actors.core.sampling import SamplingParams
from cluster.streams import (
    JournalConflict,
    SpeculationCounts,
    StopScanner,
    StreamJournal,
    StreamOrder,
    TextStream,
)

INGRESS = Endpoint("ingress-0", "ingress", "local://i", "", "e1")
ORDER = StreamOrder("r", (7, 8, 9), 10, SamplingParams(seed=5, noise_key=5), (99,))


def placed(order: StreamOrder = ORDER) -> StreamJournal:
    journal = StreamJournal(order)
    journal.place(INGRESS)
    return journal


def delta(
    first_index: int, *token_ids: int, generation: int = 0, finish=None, **counts: int
) -> TokenDelta:
    return TokenDelta("r", generation, first_index, token_ids, finish, **counts)


# --- journal ----------------------------------------------------------------------------------------------------------


def test_tokens_are_taken_in_order_and_repeats_dropped():
    journal = placed()
    assert journal.apply(delta(0, 1, 2)) == (1, 2)
    assert journal.apply(delta(0, 1, 2)) == ()
    assert journal.apply(delta(1, 2, 3, 4)) == (3, 4)
    assert journal.token_ids == [1, 2, 3, 4]


def test_log_probabilities_stay_beside_their_tokens():
    order = StreamOrder("r", (7,), 9, SamplingParams(logprobs=LogprobsOrder(0)))
    journal = placed(order)

    def entries(*tokens: int) -> tuple[TokenLogprobs, ...]:
        return tuple(TokenLogprobs(-float(token)) for token in tokens)

    journal.apply(replace(delta(0, 1, 2), logprobs=entries(1, 2)))
    journal.apply(replace(delta(1, 2, 3, 4), logprobs=entries(2, 3, 4)))
    with pytest.raises(JournalConflict, match="0 log probabilities, 1 expected"):
        journal.apply(delta(4, 5))
    journal.place(INGRESS)
    journal.apply(replace(delta(4, 5, generation=1), logprobs=entries(5)))
    assert journal.logprobs == list(entries(1, 2, 3, 4, 5))
    journal.close("stop", 3)
    assert journal.token_ids == [1, 2, 3] and journal.logprobs == list(entries(1, 2, 3))
    unasked = placed()
    with pytest.raises(JournalConflict, match="1 log probabilities, 0 expected"):
        unasked.apply(replace(delta(0, 1), logprobs=entries(1)))


def test_a_gap_is_a_conflict_and_takes_nothing():
    journal = placed()
    journal.apply(delta(0, 1))
    with pytest.raises(JournalConflict, match=r"tokens 1\.\.2 are missing"):
        journal.apply(delta(3, 4))
    assert journal.token_ids == [1]


def test_other_tokens_than_the_client_has_are_a_conflict():
    journal = placed()
    journal.apply(delta(0, 1, 2, 3))
    with pytest.raises(JournalConflict, match="differ"):
        journal.apply(delta(1, 2, 4, 5))
    with pytest.raises(JournalConflict, match="already sent"):
        journal.apply(delta(0, 1, finish="stop"))
    assert journal.token_ids == [1, 2, 3]


def test_another_generation_says_nothing():
    journal = placed()
    journal.apply(delta(0, 1))
    journal.place(INGRESS)
    assert journal.apply(delta(1, 2, generation=0)) == ()
    assert journal.apply(delta(1, 3, generation=2)) == ()
    assert journal.apply(delta(1, 4, generation=1)) == (4,)
    assert journal.token_ids == [1, 4] and journal.num_late == 2


def test_nothing_is_taken_after_the_end():
    journal = placed()
    assert journal.apply(delta(0, 1, finish="stop")) == (1,)
    assert journal.apply(delta(1, 2)) == ()
    assert journal.finish_reason == "stop" and journal.token_ids == [1]


def test_more_than_was_asked_for_is_a_conflict():
    with pytest.raises(JournalConflict, match="asked for"):
        placed().apply(delta(0, *range(11)))


def test_a_replay_carries_prompt_and_committed_ids():
    journal = placed()
    journal.apply(delta(0, 1, 2))
    again = journal.place(INGRESS)
    assert list(again.prompt_ids) == [7, 8, 9, 1, 2]
    assert (again.generation, again.num_prior_tokens, again.max_new_tokens) == (1, 2, 10)
    assert again.sampling == ORDER.sampling and again.stop_token_ids == (99,)


def test_a_lost_final_delta_needs_no_replay():
    journal = placed()
    journal.apply(delta(0, 1, 99))
    assert journal.settle() and journal.finish_reason == "stop"
    full = placed()
    full.apply(delta(0, *range(10)))
    assert full.settle() and full.finish_reason == "length"
    open_end = placed()
    open_end.apply(delta(0, 1))
    assert not open_end.settle() and open_end.finish_reason is None


def test_counts_add_up_over_generations_and_never_fall():
    journal = placed()
    journal.apply(delta(0, 1, num_rounds=2, num_proposed=10, num_scheduled=6, num_accepted=3))
    journal.apply(delta(0, 1, num_rounds=1, num_proposed=5, num_scheduled=3, num_accepted=1))
    assert journal.counts == SpeculationCounts(2, 10, 6, 3)
    journal.place(INGRESS)
    journal.apply(
        delta(1, 2, generation=1, num_rounds=1, num_proposed=5, num_scheduled=2, num_accepted=1)
    )
    assert journal.counts == SpeculationCounts(3, 15, 8, 4)


def test_cached_tokens_are_those_of_the_rank_that_sent_the_first_token():
    journal = placed()
    assert journal.num_cached == 0
    journal.apply(delta(0, num_cached=3))
    journal.place(INGRESS)
    journal.apply(delta(0, 1, generation=1, num_cached=16))
    journal.apply(delta(0, 1, generation=1, num_cached=2))
    journal.apply(delta(1, 2, generation=1, num_cached=32))
    assert journal.num_cached == 16


@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_duplicates_and_late_generations_never_change_the_tokens(seed, lengths):
    rng = random.Random(seed)
    tokens = list(range(100, 100 + sum(lengths)))
    journal = placed(StreamOrder("r", (1,), len(tokens), SamplingParams()))
    taken: list[int] = []
    at = 0
    for length in lengths:
        if rng.random() < 0.2:
            journal.place(INGRESS)
        good = delta(at, *tokens[at : at + length], generation=journal.generation)
        start = rng.randint(0, at)
        noise = [
            good,
            delta(start, *tokens[start : at + length], generation=journal.generation),
            delta(at, 1, 2, 3, generation=journal.generation - 1),
        ]
        rng.shuffle(noise)
        for message in noise:
            taken += journal.apply(message)
        at += length
    assert taken == journal.token_ids == tokens


# --- stop strings -----------------------------------------------------------------------------------------------------


def offline(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the match that ends first, of those the one that starts first."""
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(
    text=st.text("abc\n", max_size=30),
    stops=st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=16),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=500)
def test_any_cut_of_any_text_stops_where_the_whole_text_does(text, stops, seed):
    rng = random.Random(seed)
    scanner = StopScanner(stops)
    shown, at = "", 0
    while at < len(text):
        length = rng.randint(1, 4)
        shown += scanner.feed(text[at : at + length])
        # What is shown is never taken back.
        assert offline(text, stops)[0].startswith(shown)
        at += length
    if scanner.matched is None:
        shown += scanner.flush()
    assert (shown, scanner.matched is not None) == offline(text, stops)


def test_text_that_cannot_become_a_stop_string_is_not_held():
    scanner = StopScanner(["STOP"])
    assert scanner.feed("abc") == "abc"
    assert scanner.feed("xST") == "x"
    assert scanner.feed("Q") == "STQ"


class Letters:
    """A detokenizer for tests: id i is the i-th letter."""

    def feed(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


def test_a_stop_string_inside_an_accepted_run_counts_only_its_tokens():
    stream = TextStream(Letters(), ["cd"], frozenset())
    assert stream.feed([0, 1]).text == "ab"
    piece = stream.feed([2, 3, 4, 5])
    assert (piece.text, piece.num_consumed, piece.stopped) == ("", 2, True)


def test_hidden_tokens_are_no_text():
    stream = TextStream(Letters(), [], frozenset({1}))
    assert stream.feed([0, 1, 2]).text == "ac"


def test_held_text_comes_out_at_the_end():
    stream = TextStream(Letters(), ["cdz"], frozenset())
    assert stream.feed([1, 2, 3]).text == "b"
    assert stream.flush().text == "cd"
