"""Prompts that begin alike: computed once, with the same tokens, the same draft contexts and the same acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.core import draft_feed
from actors.core.messages import CommitBatch
from tests.pure.rank_harness import Session, admitted, make_rank
from tests.pure.scripted_drafter import DRAFTER, VOCAB, oracle

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(23)]


def make_session(error: float = 0.0, **overrides: object) -> Session:
    return Session(make_rank(**overrides), error=error)


def computed(session: Session, name: str, prompt: Sequence[int] = PROMPT, max_new: int = 12) -> int:
    """Serve one request; how many of its prompt tokens the target computed."""
    before = session.rank.counters.num_prefill_tokens
    session.submit(admitted(name, prompt, max_new))
    session.run()
    stream = session.streams[name]
    assert (stream.tokens, stream.reason) == oracle(prompt, max_new)
    assert session.rank.check_idle() == []
    num_computed = session.rank.counters.num_prefill_tokens - before
    assert stream.last is not None
    assert stream.last.num_cached == len(prompt) - num_computed
    return num_computed


def rounds_of(session: Session, name: str) -> tuple[int, int]:
    last = session.streams[name].last
    assert last is not None
    return last.num_rounds, last.num_accepted


def test_the_same_prompt_twice_is_computed_once_and_accepted_alike() -> None:
    session = make_session()
    assert computed(session, "cold") == 23
    assert computed(session, "hit") == 3, "five full blocks of four are known"
    assert rounds_of(session, "hit") == rounds_of(session, "cold")
    cache = session.rank.book.cache
    assert (cache.num_hits, cache.num_hit_tokens, cache.num_asked_tokens) == (1, 20, 46)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_the_last_prompt_token_is_always_computed(length: int) -> None:
    session = make_session()
    computed(session, "cold", PROMPT[:length])
    assert computed(session, "hit", PROMPT[:length]) == length - (length - 1) // 4 * 4


def test_prompts_that_part_inside_a_block_share_the_blocks_before_it() -> None:
    session = make_session()
    computed(session, "a")
    other = [*PROMPT[:14], (PROMPT[14] + 1) % VOCAB, *PROMPT[15:]]
    assert computed(session, "b", other) == 23 - 12
    assert computed(session, "c", PROMPT[4:]) == 19, "other positions are other blocks"


def test_the_output_of_a_turn_is_the_prompt_of_the_next() -> None:
    session = make_session()
    computed(session, "first")
    turn = [*PROMPT, *session.streams["first"].tokens, 7]
    # The K/V of its last token was never computed.
    assert computed(session, "second", turn) == 36 - (23 + 12 - 1) // 4 * 4


def test_without_the_cache_everything_is_computed_again() -> None:
    session = make_session(prefix_cache=False)
    assert [computed(session, name) for name in ("a", "b")] == [23, 23]
    cache = session.rank.book.cache
    assert (cache.num_asked_tokens, session.rank.book.pool.num_unused) == (0, 0)


def test_another_model_knows_nothing_of_it() -> None:
    first, second = (make_session(model_identity=name) for name in ("a", "b"))
    for session in (first, second):
        computed(session, "r")
    digests = [set(s.rank.book.pool._by_digest) for s in (first, second)]
    assert digests[0] and not digests[0] & digests[1]


def test_a_prompt_in_chunks_goes_on_behind_what_another_has_computed_meanwhile() -> None:
    session = make_session(max_batch_tokens=8)
    for name in ("a", "b"):
        session.submit(admitted(name, PROMPT, 6))
    session.run()
    assert session.streams["a"].tokens == session.streams["b"].tokens == oracle(PROMPT, 6)[0]
    assert session.rank.counters.num_prefill_tokens == 23 + 1 + 3


def test_the_drafter_is_told_the_whole_context_of_a_hit() -> None:
    session = make_session()
    computed(session, "cold")
    session.sent.clear()
    session.submit(admitted("hit", PROMPT, 12))
    session.step()
    (commit,) = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    assert commit.first_positions.tolist() == [0] and commit.committed_lens.tolist() == [24]
    assert commit.features[:, 0].tolist() == list(range(23))
    assert commit.token_ids.tolist() == PROMPT
    assert commit.wants_block.tolist() == [True]


def test_a_long_context_is_told_in_bounded_pieces_before_a_block_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = make_session()
    computed(session, "cold", max_new=20)
    monkeypatch.setattr(draft_feed, "_MOST_CAUGHT_UP_BYTES", 10 * 2 * 4)  # ten rows of two float32
    session.sent.clear()
    session.submit(admitted("hit", PROMPT, 20))
    session.run()
    commits = [m for _, m in session.sent if isinstance(m, CommitBatch)]
    assert [np.diff(c.cu_feature_len).max() for c in commits][:3] == [10, 10, 5]
    assert [c.wants_block.tolist() for c in commits][:3] == [[False], [False], [True]]
    assert session.streams["hit"].tokens == oracle(PROMPT, 20)[0]
    assert session.rank.counters.num_unasked == 0 and session.rank.counters.num_late == 0


def test_a_new_drafter_gets_every_context_and_drafts_as_the_old_one_did() -> None:
    session = make_session()
    session.submit(admitted("a", PROMPT, 40))
    session.submit(admitted("b", PROMPT[:7], 40))
    for _ in range(4):
        session.step()
    session.drafter.contexts.clear()
    session.rank.set_drafters([replace(DRAFTER, epoch="2")])
    session.step()
    contexts = session.drafter.contexts
    assert {name: context.start for name, context in contexts.items()} == {"a": 0, "b": 0}
    accepted = session.rank.counters.acceptance.accepted.sum()
    session.step()
    assert session.rank.counters.acceptance.accepted.sum() == accepted + 2 * 3
    session.run()
    assert session.streams["a"].tokens == oracle(PROMPT, 40)[0]


def test_known_blocks_give_way_to_requests_that_need_the_room() -> None:
    session = make_session(num_blocks=14, max_model_len=40)
    computed(session, "a")
    other = [(token + 1) % VOCAB for token in PROMPT]
    computed(session, "b", other)
    assert session.rank.book.pool.num_evicted > 0
    assert computed(session, "b again", other) == 3
    assert computed(session, "a again") > 3


def test_a_target_without_features_shares_its_prompts_too() -> None:
    session = make_session(gamma=0)
    step = session.target.step
    session.target.step = lambda plan: replace(step(plan), features=None)
    assert [computed(session, name) for name in ("a", "b")] == [23, 3]
    assert session.rank.book.cache.features_of(np.arange(3)).shape == (3, 0)


def test_an_aborted_prompt_leaves_what_was_computed_of_it() -> None:
    session = make_session(max_batch_tokens=8)
    session.submit(admitted("a", PROMPT, 6))
    session.step()
    session.rank.book.end(session.rank.book.live["a"])
    assert computed(session, "b") == 23 - 8
