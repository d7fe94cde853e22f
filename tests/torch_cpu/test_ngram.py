"""Prompt lookup: what it proposes, and that its messages keep every acceptance rule exact."""

from __future__ import annotations

import random

import numpy as np
import torch

from actors.core.messages import ProposalBatch
from actors.engine.drafters.ngram import LONGEST, NgramEngine
from tests.torch_cpu.tiny_drafters import Entry, commit_batch


def entry(name: str, text: list[int], first: int, committed: int, verified: int = 0) -> Entry:
    own = torch.tensor(text[first : committed - 1], dtype=torch.long)
    features = torch.zeros((len(own), 0))
    return Entry(name, committed, first, features, text[committed - 1], own, verified)


def plain_lookup(text: list[int], gamma: int) -> tuple[list[int], int]:
    """Search backwards for the longest suffix that occurred before, with the latest occurrence."""
    for length in range(min(LONGEST, len(text) - 1), 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                grown = list(text)
                for k in range(gamma):
                    grown.append(grown[start + length + k])
                return grown[len(text) :], length
    return [], 0


def block(proposal: ProposalBatch | None, row: int = 0) -> list[int]:
    assert proposal is not None
    return proposal.draft_token_ids[row].tolist()


def test_it_proposes_what_followed_the_longest_recent_match() -> None:
    rng = random.Random(0)
    for trial in range(40):
        text = [rng.randrange(4) for _ in range(60)]
        engine, at = NgramEngine("n", 5, 3), 0
        for committed in (7, 8, 13, 30, 31, 60):
            proposal = engine.advance(commit_batch([entry("a", text, at, committed)]))
            wanted, length = plain_lookup(text[:committed], 5)
            assert block(proposal) == (wanted or [text[committed - 1]] * 5), trial
            assert proposal is not None
            assert (proposal.confidences > 0).all() == (length > 0)
            at = committed - 1


def test_without_a_match_it_answers_with_confidence_zero() -> None:
    proposal = NgramEngine("n", 3, 2).advance(commit_batch([entry("a", [5, 6, 7, 8], 0, 4)]))
    assert block(proposal) == [8, 8, 8]
    assert proposal is not None
    assert proposal.confidences.tolist() == [[0, 0, 0]]


def test_q_is_one_at_the_proposed_token() -> None:
    text = [1, 2, 3, 9, 1, 2]
    proposal = NgramEngine("n", 3, 4).advance(commit_batch([entry("a", text, 0, 6)]))
    assert proposal is not None
    assert block(proposal) == [3, 9, 1]
    assert proposal.q_ids[0, :, 0].tolist() == [3, 9, 1]
    assert (proposal.q_ids[0, :, 1:] == -1).all()
    assert proposal.q_probs[0].tolist() == [[1, 0, 0, 0]] * 3


def test_requests_are_kept_apart_and_closed() -> None:
    engine = NgramEngine("n", 2, 1)
    one, other = [1, 2, 3, 1, 2], [1, 2, 7, 1, 2]
    both = engine.advance(commit_batch([entry("a", one, 0, 5), entry("b", other, 0, 5)]))
    assert block(both, 0) == [3, 1]
    assert block(both, 1) == [7, 1]
    assert engine.open_requests() == ("a", "b")
    engine.close(("a", "never-seen"))
    assert engine.open_requests() == ("b",)


def test_repeated_old_and_broken_commits_change_nothing() -> None:
    engine, text = NgramEngine("n", 2, 1), [1, 2, 3, 1, 2, 3, 1]
    first = commit_batch([entry("a", text, 0, 5)])
    assert block(engine.advance(first)) == [3, 1]
    assert engine.advance(first) is None
    # An overlapping commit says the known part again.
    assert block(engine.advance(commit_batch([entry("a", text, 2, 7)]))) == [2, 3]
    # A newer generation starts over; an older one is ignored.
    again = commit_batch([entry("a", [8, 9, 8], 0, 3)], generation=1)
    assert block(engine.advance(again)) == [9, 8]
    assert engine.advance(commit_batch([entry("a", text, 0, 7)])) is None
    # A hole: only what comes behind it counts.
    late = commit_batch([entry("a", [0] * 20 + [4, 5, 4], 20, 23)], generation=1)
    assert block(engine.advance(late)) == [5, 4]
    # Rows missing before the anchor: no block, and no wrong text afterwards.
    whole = entry("a", [0] * 20 + [4, 5, 4, 6, 4, 5], 22, 26)
    cut = whole._replace(ids=whole.ids[:-1], rows=whole.rows[:-1])
    assert engine.advance(commit_batch([cut], generation=1)) is None


def test_it_waits_while_a_prompt_is_read() -> None:
    engine, text = NgramEngine("n", 2, 1), [1, 2, 3, 1, 2]
    assert engine.advance(commit_batch([entry("a", text, 0, 4)], wants=False)) is None
    assert block(engine.advance(commit_batch([entry("a", text, 3, 5)]))) == [3, 1]


def test_confidences_follow_what_was_accepted_at_a_length_of_match() -> None:
    engine = NgramEngine("n", 2, 1)
    cycle = [1, 2, 3, 4, 5] * 200
    at, committed = 0, 12
    for _ in range(60):  # every round two draft tokens are verified and accepted
        proposal = engine.advance(commit_batch([entry("a", cycle, at, committed, verified=2)]))
        at, committed = committed - 1, committed + 3
    assert proposal is not None
    assert proposal.confidences[0].min() > 0.9
    engine = NgramEngine("n", 2, 1)
    noise = np.random.default_rng(0).integers(0, 3, 400).tolist()
    at, committed = 0, 12
    for _ in range(60):  # and here none is
        proposal = engine.advance(commit_batch([entry("b", noise, at, committed, verified=2)]))
        at, committed = committed - 1, committed + 1
    assert proposal is not None
    assert proposal.confidences[0, 0] < 0.6
