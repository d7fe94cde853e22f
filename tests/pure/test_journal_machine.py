"""A stream's journal as a state machine: ranks die, messages are lost, repeated, late and reordered.

The model is what each life of the stream (a generation, on one rank) says at each position: the same in every life for
a seeded stream, something else in each for the others. A client may only ever see, position by position, what the life
that was current then said, and all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.core.messages import AdmittedRequest, Endpoint, FinishReason, TokenDelta
from actors.core.sampling import SamplingParams
from cluster.streams import JournalConflict, StreamJournal, StreamOrder
from tests.pure.machines import finds, holds

INGRESS = Endpoint("ingress-0", "ingress", "local://i", "", "e1")
PROMPT, STOP = (7, 8, 9), 99


class JournalMachine(RuleBasedStateMachine):
    @initialize(
        seeded=st.booleans(), max_new=st.integers(1, 8), stop_at=st.one_of(st.none(), st.just(4))
    )
    def begin(self, seeded: bool, max_new: int, stop_at: int | None) -> None:
        self.seeded, self.max_new, self.stop_at = seeded, max_new, stop_at
        order = StreamOrder("r", PROMPT, max_new, SamplingParams(), (STOP,))
        self.journal = StreamJournal(order)
        self.shown: list[int] = []  # what the client has
        self.lives: list[int] = []  # of each of its tokens: the generation that said it
        self.network: list[TokenDelta] = []
        self.sent: list[TokenDelta] = []
        self.num_rounds = 0
        self.life = -1
        self.place()

    def token(self, generation: int, position: int) -> int:
        if position == self.stop_at:
            return STOP
        return 1000 + position + (0 if self.seeded else 100 * generation)

    def place(self) -> None:
        """As a stream does whose rank is lost: it may be over already, though its last message was lost."""
        if self.journal.settle():
            return
        assert len(self.shown) < self.max_new and STOP not in self.shown, "over, and placed again"
        self.life += 1
        admission: AdmittedRequest = self.journal.place(INGRESS)
        assert admission.prompt_ids.tolist() == [*PROMPT, *self.shown]
        assert admission.num_prior_tokens == len(self.shown)
        assert admission.generation == self.journal.generation == self.life
        self.said = len(self.shown)  # by the rank that has it now
        self.num_rounds = 0
        self.is_over = False

    @property
    def is_running(self) -> bool:
        return self.journal.finish_reason is None

    @precondition(lambda self: self.is_running and not self.is_over)
    @rule(count=st.integers(1, 4), apart=st.booleans())
    def say(self, count: int, apart: bool) -> None:
        """The next tokens; the end may come in a message of its own."""
        first = self.said
        end = min(first + count, self.max_new)
        if self.stop_at is not None and first <= self.stop_at:
            end = min(end, self.stop_at + 1)
        tokens = tuple(self.token(self.life, p) for p in range(first, end))
        reason: FinishReason | None = "length" if end == self.max_new else None
        if tokens[-1] == STOP:
            reason = "stop"
        self.said, self.is_over = end, reason is not None
        if reason is not None and apart:
            self._send(first, tokens, None)
            first, tokens = end, ()
        self._send(first, tokens, reason)

    def _send(self, first: int, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        self.num_rounds += 1
        delta = TokenDelta("r", self.life, first, tokens, reason, num_rounds=self.num_rounds)
        self.network.append(delta)
        self.sent.append(delta)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.network.append(data.draw(st.sampled_from(self.sent)))

    @precondition(lambda self: self.network)
    @rule(in_order=st.booleans(), data=st.data())
    def deliver(self, in_order: bool, data: st.DataObject) -> None:
        last = len(self.network) - 1
        delta = self.network.pop(0 if in_order else data.draw(st.integers(0, last)))
        before = self.journal.counts.num_rounds
        try:
            fresh = self.journal.apply(delta)
        except JournalConflict:
            self.place()
            return
        for token in fresh:
            assert token == self.token(self.life, len(self.shown))
            self.shown.append(token)
            self.lives.append(self.life)
        assert self.journal.counts.num_rounds >= before

    @precondition(lambda self: self.is_running)
    @rule()
    def die(self) -> None:
        self.place()

    @invariant()
    def the_client_has_what_the_journal_holds(self) -> None:
        if not hasattr(self, "journal"):
            return
        assert self.journal.token_ids == self.shown
        said = [self.token(life, position) for position, life in enumerate(self.lives)]
        assert self.shown == said and self.lives == sorted(self.lives)
        if not self.is_running:
            is_stopped = self.journal.finish_reason == "stop"
            assert self.shown[-1] == STOP if is_stopped else len(self.shown) == self.max_new

    def teardown(self) -> None:
        """Left in peace, the stream comes to its end, complete."""
        if not hasattr(self, "journal"):
            return
        while self.is_running:
            self.place()
            self.network.clear()
            while self.is_running and not self.is_over:
                self.say(3, False)
                self.deliver(True, None)  # type: ignore[arg-type]
        ends_at = self.max_new if self.stop_at is None else min(self.max_new, self.stop_at + 1)
        assert len(self.shown) == ends_at
        self.the_client_has_what_the_journal_holds()


def test_a_stream_is_complete_and_of_its_lives_in_any_order_of_events() -> None:
    holds(JournalMachine)


# --- the machine sees -------------------------------------------------------------------------------------------------

apply, place = StreamJournal.apply, StreamJournal.place


def _takes_any_generation(journal: StreamJournal, delta: TokenDelta) -> tuple[int, ...]:
    return apply(journal, replace(delta, generation=journal.generation))


def _appends_whatever_comes(journal: StreamJournal, delta: TokenDelta) -> tuple[int, ...]:
    return apply(journal, replace(delta, first_index=len(journal.token_ids)))


def _forgets_the_gap(journal: StreamJournal, delta: TokenDelta) -> tuple[int, ...]:
    held = len(journal.token_ids)
    return apply(journal, replace(delta, first_index=min(delta.first_index, held)))


def _replays_the_prompt_only(journal: StreamJournal, reply_to: Endpoint) -> AdmittedRequest:
    return replace(place(journal, reply_to), num_prior_tokens=0)


def _reuses_the_generation(journal: StreamJournal, reply_to: Endpoint) -> AdmittedRequest:
    journal.generation = max(journal.generation, 0) - 1
    return place(journal, reply_to)


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("apply", _takes_any_generation),
        ("apply", _appends_whatever_comes),
        ("apply", _forgets_the_gap),
        ("place", _replays_the_prompt_only),
        ("place", _reuses_the_generation),
        ("settle", lambda journal: False),
    ],
)
def test_the_machine_finds(
    method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(JournalMachine, StreamJournal, method, mutant, monkeypatch)
