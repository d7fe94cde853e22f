"""Requests of a rank as a state machine: they come, come again, move on to another life, end, give way, in any order.

The model is the oracle's text of each stream. After every event the streams say a prefix of it, the rank holds exactly
the requests that are not over, and each block belongs to one of them; at the end all comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.core.admission import AdmissionDesk
from actors.core.drafting import DraftExchange
from actors.core.kv_blocks import BlockPool
from actors.core.messages import AbortRequest, AdmittedRequest
from actors.core.request import Request
from actors.core.request_book import RequestBook
from tests.pure.machines import finds, holds
from tests.pure.rank_harness import Session, Stream, admitted, make_rank, reserve
from tests.pure.scripted_drafter import INGRESS, oracle

BEGINNINGS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8]]


class RequestMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(7, 20), gamma=st.sampled_from([0, 3]), seed=st.integers(0, 9)
    )
    def begin(self, num_blocks: int, gamma: int, seed: int) -> None:
        rank = make_rank(num_blocks=num_blocks, gamma=gamma, max_running=3, max_waiting=20)
        self.session = Session(rank, error=0.3, seed=seed)
        self.messages: dict[str, AdmittedRequest] = {}  # the newest life of every request
        self.told: dict[str, list[int]] = {}  # what its lives before this one have said
        self.is_over: set[str] = set()

    @rule(
        text=st.integers(0, 1),
        length=st.integers(1, 12),
        max_new=st.integers(1, 10),
        reserves=st.booleans(),
    )
    def come(self, text: int, length: int, max_new: int, reserves: bool) -> None:
        name = f"r{len(self.messages)}"
        prompt = (BEGINNINGS[text] * 2)[:length]
        if reserves:
            wanted = reserve(name, len(prompt), max_new)
            self.session.deliver(self.session.rank.on_message(wanted, self.session.now))
        self._admit(admitted(name, prompt, max_new), [])

    def _admit(self, message: AdmittedRequest, told: list[int]) -> None:
        name = message.request_id
        self.messages[name], self.told[name] = message, told
        self.is_over.discard(name)
        self.session.submit(message)

    def _streams(self) -> dict[str, Stream]:
        return self.session.streams

    @property
    def alive(self) -> list[str]:
        return sorted(self.messages.keys() - self.is_over)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        """A message that was sent twice, perhaps long after its request ended."""
        message = self.messages[data.draw(st.sampled_from(sorted(self.messages)))]
        self.session.deliver(self.session.rank.on_message(message, self.session.now))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """The ingress places the stream again, on this very rank: a new life, with all it has been told as prompt."""
        name = data.draw(st.sampled_from(self.alive))
        old, stream = self.messages[name], self._streams()[name]
        told = [*self.told[name], *stream.tokens]
        if stream.reason is not None or len(told) >= old.max_new_tokens:
            return
        original = old.prompt_ids[: len(old.prompt_ids) - old.num_prior_tokens].tolist()
        self._admit(
            admitted(
                name,
                [*original, *told],
                old.max_new_tokens,
                num_prior=len(told),
                generation=old.generation + 1,
            ),
            told,
        )

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), age=st.integers(0, 1))
    def abort(self, data: st.DataObject, age: int) -> None:
        """Of this life, or late, of the one before: that one ends nothing."""
        name = data.draw(st.sampled_from(sorted(self.messages)))
        message = AbortRequest(name, self.messages[name].generation - age)
        was_live = name in self.session.rank.book.live
        self.session.deliver(self.session.rank.on_message(message, self.session.now))
        is_live = name in self.session.rank.book.live
        assert is_live == (was_live and age == 1)

    @rule(count=st.integers(1, 6), drafts=st.booleans())
    def step(self, count: int, drafts: bool) -> None:
        for _ in range(count):
            if self.session.step(drafts) is None and self.session.rank.deadline is not None:
                self.session.now = max(self.session.now, self.session.rank.deadline)

    @rule()
    def lose_the_ingress(self) -> None:
        self.session.deliver(self.session.rank.abort_ingress(INGRESS.name))
        self.is_over |= self.messages.keys()
        assert not self.session.rank.book.live

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        if hasattr(self, "session"):
            self.streams_say_what_the_oracle_says()
            self.every_block_belongs_to_one_that_is_alive()

    def streams_say_what_the_oracle_says(self) -> None:
        for name, stream in self._streams().items():
            message = self.messages[name]
            prompt, num_prior = message.prompt_ids.tolist(), message.num_prior_tokens
            said, _ = oracle(prompt, message.max_new_tokens, num_prior=num_prior)
            assert stream.tokens == said[: len(stream.tokens)]
            assert stream.reason != "length" or len(stream.tokens) == len(said)
            if stream.reason is not None:
                self.is_over.add(name)

    def every_block_belongs_to_one_that_is_alive(self) -> None:
        book = self.session.rank.book
        assert sorted(book.live) == self.alive
        assert book.pool.check_integrity() == []
        assert book.pool.num_leases == sum(r.slot >= 0 for r in book.live.values())
        assert all(name in book.live for name in self._drafted())

    def _drafted(self) -> list[str]:
        return [r.request_id for r in self.session.rank.book.table.requests if r is not None]

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.run()
            self.streams_say_what_the_oracle_says()
            assert self.alive == []
            assert self.session.rank.check_idle() == []
            pool = self.session.rank.book.pool
            assert pool.num_free == pool.num_blocks and not self.session.drafter.contexts


def test_requests_say_what_they_must_and_give_all_back_in_any_order_of_events() -> None:
    holds(RequestMachine)


# --- the machine sees -------------------------------------------------------------------------------------------------

abort, release, preempt = RequestBook.abort, RequestBook.release, Request.preempt


def _ends_any_generation(book: RequestBook, message: AbortRequest) -> Request | None:
    request = book.live.get(message.request_id)
    generation = request.generation if request else message.generation
    return abort(book, AbortRequest(message.request_id, generation))


def _keeps_the_blocks(book: RequestBook, request: Request) -> None:
    request._lease = None
    release(book, request)


def _preempts_and_goes_on_where_it_was(request: Request) -> None:
    context_len = request.context_len
    preempt(request)
    request.context_len = min(context_len, request.prefill_len - 1)


@pytest.mark.parametrize(
    ("of", "method", "mutant"),
    [
        (RequestBook, "abort", _ends_any_generation),
        (RequestBook, "release", _keeps_the_blocks),
        (AdmissionDesk, "is_known", lambda desk, request_id, generation: False),
        (DraftExchange, "close", lambda drafts, request: None),
        (Request, "preempt", _preempts_and_goes_on_where_it_was),
        (BlockPool, "_evict", lambda pool: pool._unused.popitem(last=False)[0]),
    ],
)
def test_the_machine_finds(
    of: type, method: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(RequestMachine, of, method, mutant, monkeypatch)
