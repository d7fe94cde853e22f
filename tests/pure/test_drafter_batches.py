"""Commits that gathered while the drafter computed become few batches without changing what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from actors.core.messages import CommitBatch, Endpoint
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.drafter import merge_commits

RANK = Endpoint("target-0", "target", "uri", "key", "epoch")


def commit(rank: Endpoint, step: int, **rows: tuple[int, int, bool]) -> CommitBatch:
    """One entry a keyword: first position, number of rows, wants a block. Features hold (position, step)."""
    first = np.array([f for f, _, _ in rows.values()], np.int32)
    lengths = np.array([n for _, n, _ in rows.values()], np.int32)
    features = [[p, step] for f, n, _ in rows.values() for p in range(f, f + n)]
    return CommitBatch(
        rank=rank,
        step=step,
        request_ids=tuple(rows),
        generations=np.zeros(len(rows), np.int32),
        committed_lens=first + lengths + 1,
        anchor_token_ids=first,
        wants_block=np.array([w for _, _, w in rows.values()], bool),
        first_positions=first,
        cu_feature_len=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        token_ids=np.array([100 * p + step for p, step in features], np.int32),
        features=np.array(features, np.float32).reshape(-1, 2),
        verify_lens=lengths - 1,
        sampling=SamplingBatch.of([SamplingParams(noise_key=step) for _ in rows]),
        min_survivals=np.full(len(rows), 0.01 * step, np.float32),
    )


def entries(batches: list[CommitBatch]) -> list[tuple[Any, ...]]:
    """(rank, request, step of its rows, first position, number of rows, wants a block), in order."""
    found = []
    for batch in batches:
        assert len(batch.features) == batch.cu_feature_len[-1]
        for i, request_id in enumerate(batch.request_ids):
            rows = batch.features[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]]
            first = int(batch.first_positions[i])
            assert list(rows[:, 0]) == list(range(first, first + len(rows)))
            own = batch.token_ids[batch.cu_feature_len[i] : batch.cu_feature_len[i + 1]]
            assert own.tolist() == (100 * rows[:, 0] + rows[:, 1]).tolist()
            assert batch.verify_lens[i] == len(rows) - 1
            assert batch.committed_lens[i] == first + len(rows) + 1
            key = int(batch.sampling.noise_key[i])
            assert batch.min_survivals[i] == np.float32(0.01 * key)
            found.append(
                (batch.rank.name, request_id, key, first, len(rows), bool(batch.wants_block[i]))
            )
    return found


def test_one_commit_stays_as_it_is() -> None:
    batch = commit(RANK, 1, a=(0, 3, True))
    assert merge_commits([batch])[0].features is batch.features
    assert merge_commits([]) == []


def test_different_requests_of_a_rank_become_one_batch() -> None:
    merged = merge_commits(
        [commit(RANK, 1, a=(0, 3, True), b=(5, 2, False)), commit(RANK, 2, c=(7, 4, True))]
    )
    assert len(merged) == 1
    assert entries(merged) == [
        ("target-0", "a", 1, 0, 3, True),
        ("target-0", "b", 1, 5, 2, False),
        ("target-0", "c", 2, 7, 4, True),
    ]


def test_a_request_that_comes_again_keeps_its_order_and_asks_for_one_block() -> None:
    merged = merge_commits(
        [
            commit(RANK, 1, a=(0, 3, True), b=(0, 1, True)),
            commit(RANK, 2, a=(3, 2, True)),
            commit(RANK, 3, c=(0, 1, True)),
        ]
    )
    assert entries(merged) == [
        ("target-0", "a", 1, 0, 3, False),
        ("target-0", "b", 1, 0, 1, True),
        ("target-0", "a", 2, 3, 2, True),
        ("target-0", "c", 3, 0, 1, True),
    ]


def test_a_last_mention_that_wants_no_block_wins() -> None:
    merged = merge_commits([commit(RANK, 1, a=(0, 3, True)), commit(RANK, 2, a=(3, 2, False))])
    assert [entry[-1] for entry in entries(merged)] == [False, False]


def test_ranks_and_incarnations_are_kept_apart() -> None:
    other, reborn = replace(RANK, name="target-1"), replace(RANK, epoch="later")
    merged = merge_commits(
        [
            commit(RANK, 1, a=(0, 1, True)),
            commit(other, 1, b=(0, 1, True)),
            commit(reborn, 1, c=(0, 1, True)),
            commit(RANK, 2, d=(0, 1, True)),
        ]
    )
    assert [(batch.rank, batch.request_ids) for batch in merged] == [
        (RANK, ("a", "d")),
        (other, ("b",)),
        (reborn, ("c",)),
    ]
