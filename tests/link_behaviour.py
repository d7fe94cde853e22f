"""What every link must do, whatever carries it. Each kind runs this class with an `open_link` fixture of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from actors.core.messages import AbortRequest, CommitBatch, Endpoint, Message
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.link import Link

OpenLink = Callable[..., Link]


def commit_batch(rank: Endpoint, num_rows: int, num_requests: int = 2) -> CommitBatch:
    """A batch whose features count up, so that a mixed-up frame shows."""
    ones = np.ones(num_requests, np.int32)
    return CommitBatch(
        rank=rank,
        step=7,
        request_ids=tuple(f"r{i}" for i in range(num_requests)),
        generations=ones,
        committed_lens=ones * 9,
        anchor_token_ids=ones * 3,
        wants_block=np.array([True] * num_requests),
        first_positions=ones * 2,
        cu_feature_len=np.linspace(0, num_rows, num_requests + 1).astype(np.int32),
        token_ids=np.arange(num_rows, dtype=np.int32),
        features=np.arange(num_rows * 600, dtype=np.uint16).reshape(num_rows, 600),
        verify_lens=ones,
        sampling=SamplingBatch.of([SamplingParams(seed=i) for i in range(num_requests)]),
        min_survivals=np.zeros(num_requests, np.float32),
    )


def receive(link: Link, num_messages: int, *senders: Link, within_s: float = 10.0) -> list[Message]:
    """Poll `link` until so many messages came; senders are polled too, as their loops would."""
    got: list[Message] = []
    deadline = time.monotonic() + within_s
    while len(got) < num_messages and time.monotonic() < deadline:
        for sender in senders:
            sender.poll(0)
        got += link.poll(0.05)
    return got


def same(left: Any, right: Any) -> bool:
    """Equality of messages that hold arrays."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return bool(left == right)


class LinkBehaviour:
    def test_messages_arrive_whole_and_in_order(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        sent = [commit_batch(a.endpoint, num_rows) for num_rows in (0, 1, 2, 400, 3)]
        for message in sent:
            a.send(b.endpoint, message)
        got = receive(b, len(sent), a)
        assert len(got) == len(sent)
        assert all(same(left, right) for left, right in zip(sent, got, strict=True))
        assert b.counters.num_received == a.counters.num_sent == len(sent)
        assert a.counters.num_dropped == 0

    def test_received_arrays_can_be_written_to(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        a.send(b.endpoint, commit_batch(a.endpoint, 400))
        (got,) = receive(b, 1, a)
        assert isinstance(got, CommitBatch)
        got.features[0, 0] = got.generations[0] = 5

    def test_a_message_is_a_copy_of_what_was_sent(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        message = commit_batch(a.endpoint, 400)
        a.send(b.endpoint, message)
        message.features[:] = 0
        (got,) = receive(b, 1, a)
        assert isinstance(got, CommitBatch) and got.features.any()

    def test_answers_go_to_the_endpoint_inside_the_message(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        a.send(b.endpoint, commit_batch(a.endpoint, 1))
        (got,) = receive(b, 1, a)
        assert isinstance(got, CommitBatch)
        b.send(got.rank, AbortRequest("answer", 1))
        assert receive(a, 1, b) == [AbortRequest("answer", 1)]

    def test_polling_without_waiting_returns_at_once(self, open_link: OpenLink) -> None:
        link = open_link("a")
        started = time.monotonic()
        assert link.poll(0) == []
        assert time.monotonic() - started < 0.5

    def test_a_waiting_poll_ends_when_its_time_is_up(self, open_link: OpenLink) -> None:
        link = open_link("a")
        started = time.monotonic()
        assert link.poll(0.2) == []
        assert 0.15 < time.monotonic() - started < 5

    def test_wake_ends_a_waiting_poll(self, open_link: OpenLink) -> None:
        link = open_link("a")
        timer = threading.Timer(0.1, link.wake)
        timer.start()
        started = time.monotonic()
        assert link.poll(30) == []
        assert time.monotonic() - started < 10
        timer.join()

    def test_a_wake_is_not_lost_before_the_poll_that_it_ends(self, open_link: OpenLink) -> None:
        link = open_link("a")
        link.poll(0)
        link.wake()
        started = time.monotonic()
        assert link.poll(30) == []
        assert time.monotonic() - started < 10

    def test_another_thread_may_send_while_the_link_is_polled(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        a.poll(0)

        def send_all() -> None:
            for i in range(50):
                a.send(b.endpoint, AbortRequest(f"r{i}", i))

        sender = threading.Thread(target=send_all)
        sender.start()
        got = receive(b, 50, a)
        sender.join()
        assert got == [AbortRequest(f"r{i}", i) for i in range(50)]

    def test_messages_to_a_peer_that_has_gone_are_dropped_and_counted(
        self, open_link: OpenLink
    ) -> None:
        a, b = open_link("a"), open_link("b")
        a.send(b.endpoint, AbortRequest("r", 1))
        receive(b, 1, a)
        b.close()
        deadline = time.monotonic() + 15
        started = time.monotonic()
        while a.counters.num_dropped == 0 and time.monotonic() < deadline:
            before = time.monotonic()
            a.send(b.endpoint, AbortRequest("r", 2))
            assert time.monotonic() - before < 1.0, "send blocked"
            a.poll(0.05)
        assert a.counters.num_dropped > 0
        assert time.monotonic() - started < 12
        assert [peer.name for peer in a.lost()] == ["b"]
        assert a.lost() == []

    def test_a_new_incarnation_does_not_get_what_was_meant_for_the_old_one(
        self, open_link: OpenLink
    ) -> None:
        a, old = open_link("a"), open_link("b")
        old_endpoint = old.endpoint
        a.send(old_endpoint, AbortRequest("to the old one", 1))
        receive(old, 1, a)
        old.close()
        new = open_link("b")
        assert new.endpoint.epoch != old_endpoint.epoch
        a.send(old_endpoint, AbortRequest("to the old one", 2))
        a.send(new.endpoint, AbortRequest("to the new one", 3))
        got = receive(new, 1, a) + receive(new, 1, a, within_s=0.5)
        assert got == [AbortRequest("to the new one", 3)]

    def test_sending_to_nowhere_never_blocks_or_raises(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        nowhere = replace(b.endpoint, name="nobody", uri=b.endpoint.uri + "0")
        if nowhere.uri.startswith("tcp"):
            nowhere = replace(nowhere, uri="tcp://127.0.0.1:9")
        started = time.monotonic()
        for i in range(600):
            a.send(nowhere, AbortRequest("r", i))
        assert time.monotonic() - started < 10
        a.poll(0)
        assert a.counters.num_dropped > 0 and a.counters.num_sent == 0

    def test_close_can_be_repeated_and_later_sends_are_dropped(self, open_link: OpenLink) -> None:
        a, b = open_link("a"), open_link("b")
        a.poll(0)
        a.close()
        a.close()
        a.send(b.endpoint, AbortRequest("r", 1))
        assert a.counters.num_dropped == 1
        assert a.poll(0.05) == []
