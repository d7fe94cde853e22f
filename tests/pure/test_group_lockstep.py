"""Every rank of a group makes the same layout of the same votes, and a group is formed once for the same processes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.lockstep import (
    VOTE_LEN,
    Formation,
    GroupBook,
    LockstepError,
    Progress,
    Vote,
    agree,
    group_of,
)


def table(*votes: Vote) -> np.ndarray:
    return np.stack([vote.pack() for vote in votes])


@given(
    st.lists(st.tuples(st.integers(0, 999), st.booleans(), st.integers(0, 3)), min_size=1),
    st.integers(0, 10**6),
)
def test_a_lockstep_layout_says_what_every_rank_voted(
    said: list[tuple[int, bool, int]], step: int
) -> None:
    votes = [Vote(step, tokens, leaves, plan_epoch=plan) for tokens, leaves, plan in said]
    layout = agree(table(*votes))
    assert layout.step == step
    assert layout.num_tokens == tuple(tokens for tokens, _, _ in said)
    assert layout.leaving == tuple(i for i, (_, leaves, _) in enumerate(said) if leaves)
    assert layout.runs == any(layout.num_tokens)
    assert layout.most_tokens == max(layout.num_tokens)


def test_what_shapes_a_collective_is_rank_0s_word_in_a_group() -> None:
    votes = table(
        Vote(3, 4, is_leading=True, plan_epoch=2, profile_epoch=7),
        Vote(3, 0, is_leading=False, plan_epoch=5, profile_epoch=1),
    )
    layout = agree(votes, current_plan=1)
    assert layout.is_led and layout.plan_epoch == 2 and layout.profile_epoch == 7
    assert not agree(votes[::-1], current_plan=1).is_led


def test_a_placement_of_the_group_changes_when_every_rank_is_ready_for_it() -> None:
    leader = Vote(0, 1, plan_epoch=2)
    assert agree(table(leader, Vote(0, 1, plan_epoch=1)), current_plan=1).plan_epoch == 1
    assert agree(table(leader, Vote(0, 1, plan_epoch=2)), current_plan=1).plan_epoch == 2


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Vote(5, 1), r"ranks \[1\] are at step \[5\], rank 0 is at 4"),
        (Vote(4, 1, protocol=9), "protocol"),
    ],
)
def test_ranks_that_have_left_the_lockstep_are_named(odd: Vote, words: str) -> None:
    with pytest.raises(LockstepError, match=words):
        agree(table(Vote(4, 1), odd))


def test_imbalance_of_a_group_is_the_fullest_rank_over_the_mean() -> None:
    assert agree(table(Vote(0, 6), Vote(0, 2))).imbalance == 1.5
    assert agree(table(Vote(0, 0), Vote(0, 0))).imbalance == 1.0
    assert len(Vote(0, 0).pack()) == VOTE_LEN


def test_progress_of_a_group_is_stuck_only_inside_a_collective() -> None:
    progress = Progress(bound_s=2.0)
    assert not progress.is_stuck(100.0)
    progress.enter(10.0)
    assert progress.waited_s(11.0) == 1.0 and not progress.is_stuck(12.0)
    assert progress.is_stuck(12.1) and not progress.is_stuck(12.1, slack=1.5)
    progress.leave()
    assert not progress.is_stuck(100.0) and progress.num_collectives == 1


def test_neighbouring_ranks_share_a_group() -> None:
    assert [group_of(rank, 2) for rank in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_a_group_is_formed_when_all_wait_and_anew_only_for_new_processes() -> None:
    book = GroupBook(("a", "b"), epoch=10)
    assert book.form([("a1", "h:1"), None]) is None
    formed = [Formation(11, rank, ("a1", "b1"), "h:1") for rank in (0, 1)]
    waiting: list[tuple[str, str] | None] = [("a1", "h:1"), ("b1", "h:2")]
    assert book.form(waiting) == formed == book.form(waiting)
    assert book.form([("a1", "h:1"), None]) is None  # one has gone in already
    again = book.form([("a2", "h:3"), ("b1", "h:2")])
    assert again is not None and again[0].epoch == 12 and again[1].address == "h:3"


def test_who_holds_up_a_group_is_named() -> None:
    book = GroupBook(("a", "b", "c"), epoch=0)
    assert book.held_up([0.1, 9.0, 9.0], bound_s=5.0) == ["b", "c"]
    assert book.held_up([0.1, 9.0, None], bound_s=5.0) == ["b"]
    assert book.held_up([0.1, 9.0, None], bound_s=10.0) == []
