"""What the supervisor sees of a rank is what a rank says."""

from __future__ import annotations

from actors.core.rank_report import rank_stats
from cluster.routing import RouteBook
from cluster.sight import sight_of
from tests.pure import test_routing
from tests.pure.rank_harness import admitted, make_rank, reserve

book = test_routing.book


def test_a_rank_that_is_asked_says_all_that_a_rollout_counts(book: RouteBook) -> None:
    rank = make_rank()
    rank.on_message(reserve("granted", 5, 4), 0.0)
    rank.on_message(admitted("here", [1, 2, 3], 4), 0.0)
    seen = sight_of(book.members["target-0"], book, rank_stats(rank))
    assert seen.num_streams == 2, "one runs or waits, one may come any moment"
    limits = rank.limits
    assert seen.num_places == limits.max_running + limits.max_waiting - 2
    assert seen.num_used_blocks + seen.num_free_blocks == rank.book.pool.num_blocks
