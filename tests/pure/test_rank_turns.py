"""A rank before its first stream, and when its streams go elsewhere, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actors.core.messages import Reserve, TokenDeltas
from actors.link import ZmqLink
from actors.peers import Peers
from tests.pure import test_shell
from tests.pure.test_shell import (
    Failures,
    describe,
    end_of,
    facts,
    start_target,
    submit,
    target_that_fails_in,
    until,
    until_ready,
)

client, failures, start = test_shell.client, test_shell.failures, test_shell.start


def test_a_rank_that_cannot_serve_a_token_is_never_called_ready(
    start: Any, failures: Failures
) -> None:
    shell = start_target(start, target_that_fails_in(0))
    until(lambda: failures)
    ((was_ready, cause),) = failures
    assert not was_ready and cause.startswith("ProofError: no first token") and "on fire" in cause
    assert describe(shell).phase == "failed"


def test_the_proof_that_a_rank_serves_is_nobodys_request_and_counted_nowhere(start: Any) -> None:
    until_ready(shell := start_target(start))
    stats = asyncio.run(shell.stats())
    counted = ("num_committed", "num_finished", "num_steps", "num_prefill_tokens")
    assert [stats[name] for name in counted] == [0, 0, 0, 0]


def test_a_drained_rank_refuses_gives_its_streams_back_and_takes_them_again(
    start: Any, client: ZmqLink
) -> None:
    shell = start_target(start)
    rank = until_ready(shell).endpoint
    submit(client, rank, "long", 300)
    until(lambda: client.poll(0.05))
    asyncio.run(shell.connect(Peers(version=1, is_drained=True)))
    assert describe(shell).phase == "draining"
    client.send(rank, Reserve("refused", client.endpoint, 3, 5))
    replies = until(lambda: [m for m in client.poll(0.05) if not isinstance(m, TokenDeltas)])
    assert not replies[0].granted and "draining" in replies[0].reason
    assert asyncio.run(shell.move_streams()) == 1
    last = end_of(client, "long")
    assert last.finish_reason == "abort" and "drained" in last.error and not last.token_ids
    asyncio.run(shell.connect(Peers(version=2)))
    assert describe(shell).phase == "ready"
    submit(client, rank, "after")
    assert end_of(client, "after").finish_reason == "length"
    until(lambda: asyncio.run(shell.stats())["is_idle"])
    assert describe(shell).integrity_problems == ()


def test_a_drafter_that_reads_other_layers_is_not_used(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    until_ready(shell := start_target(start))
    known = facts("drafter-0", 5)
    other = replace(known, spec=replace(known.spec, tap_layer_ids=(1, 2)))
    asyncio.run(shell.connect(Peers(version=1, drafters=(other,))))
    assert "drafter-0 is not used by target-0: it reads layers (1, 2), not (0,)" in caplog.text
    asyncio.run(shell.connect(Peers(version=2, drafters=(known,))))
    assert list(shell._rank.book.drafts.drafters) == ["drafter-0"]
