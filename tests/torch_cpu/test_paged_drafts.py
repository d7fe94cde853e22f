"""The drafter's captured form: the same proposals as the eager one, whatever rows, padding and tiers a replay gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.core.messages import CommitBatch, ProposalBatch
from actors.core.sampling import SamplingBatch, SamplingParams
from actors.engine.drafters import context as context_module
from actors.engine.drafters import packed_backbone, paged_drafts
from actors.engine.drafters.engine import DSparkEngine
from actors.engine.graphs import Recorded
from tests.torch_cpu.graph_tape import TapeRecorder
from tests.torch_cpu.mutation import mutant
from tests.torch_cpu.tiny_drafters import (
    DFLASH,
    Stream,
    commit_batch,
    tiny_config,
    tiny_engine,
    tiny_model,
)

GREEDY = SamplingParams(temperature=0.0)
MIXED = (
    SamplingParams(temperature=0.8, noise_key=11),
    SamplingParams(temperature=1.2, seed=4, noise_key=4, top_p=0.7),
    GREEDY,
    SamplingParams(temperature=0.6, noise_key=5, top_k=3),
)


@pytest.fixture
def recorder() -> Iterator[TapeRecorder]:
    torch.set_num_threads(1)
    made = TapeRecorder()
    with made.watched_kernels():
        yield made


class Pair:
    """An eager engine and a captured one that hear the same commits."""

    def __init__(self, recorder: Any, **changes: Any) -> None:
        self.config = tiny_config(**changes)
        model = tiny_model(self.config)
        self.eager, self.captured = tiny_engine(model), tiny_engine(model)
        self.captured.use_paged(recorder)
        self.streams = {n: Stream(n, 700, self.config, i) for i, n in enumerate("abcdefgh")}
        self.length = dict.fromkeys(self.streams, 0)

    @property
    def paged(self) -> paged_drafts.PagedDrafts:
        assert self.captured.paged is not None
        return self.captured.paged

    def batch(self, added: dict[str, int], params: tuple[SamplingParams, ...]) -> CommitBatch:
        entries = []
        for name, count in added.items():
            first = max(self.length[name] - 1, 0)
            self.length[name] += count
            entries.append(self.streams[name].commit(first, self.length[name]))
        kinds = [params[i % len(params)] for i in range(len(added))]
        return replace(commit_batch(entries), sampling=SamplingBatch.of(kinds))

    def round(
        self, added: dict[str, int], params: tuple[SamplingParams, ...] = (GREEDY,)
    ) -> ProposalBatch:
        batch = self.batch(added, params)
        wanted, found = self.eager.advance(batch), self.captured.advance(batch)
        assert wanted is not None and found is not None
        same(found, wanted)
        return found

    def opened(self, count: int) -> dict[str, int]:
        """First commits of so many more requests."""
        names = [f"r{i}" for i in range(count)]
        for i, name in enumerate(names):
            self.streams[name] = Stream(name, 20, self.config, 30 + i)
        self.length |= dict.fromkeys(names, 0)
        return dict.fromkeys(names, 5)

    def close(self, *names: str) -> None:
        for engine in (self.eager, self.captured):
            engine.close(names)
        for name in names:
            self.length[name] = 0


def same(found: ProposalBatch, wanted: ProposalBatch) -> None:
    assert found.request_ids == wanted.request_ids
    np.testing.assert_array_equal(found.draft_token_ids, wanted.draft_token_ids)
    np.testing.assert_array_equal(found.q_ids, wanted.q_ids)
    np.testing.assert_allclose(found.q_probs, wanted.q_probs, atol=2e-5)
    np.testing.assert_allclose(found.confidences, wanted.confidences, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"draft_vocab_size": 96},
        {"enable_confidence_head": False},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        DFLASH,
    ],
    ids=str,
)
@pytest.mark.parametrize("params", [(GREEDY,), MIXED], ids=["greedy", "mixed"])
def test_replays_equal_eager_drafts_for_changing_rows(
    recorder: TapeRecorder, changes: dict[str, Any], params: tuple[SamplingParams, ...]
) -> None:
    pair = Pair(recorder, **changes)
    pair.round({"a": 12, "b": 3, "c": 30}, params)
    pair.round({"c": 1, "a": 5, "d": 1}, params)
    pair.round({"b": 6, "d": 2, "a": 1}, params)
    pair.close("a", "c")
    # Other requests now hold the rows that graph has read before, with shorter contexts.
    pair.round({"e": 2, "f": 9, "b": 1}, params)
    pair.round({"f": 4, "e": 1, "d": 3}, params)
    assert recorder.num_records == 1
    assert pair.paged.num_replays == 5
    assert pair.paged.num_capture_failures == 0


def test_padding_entries_change_nothing_for_real_ones(recorder: TapeRecorder) -> None:
    """Five requests are drafted for in a tier of six, before and after six that left their traces."""
    pair = Pair(recorder)
    pair.round(dict.fromkeys("abcde", 7), MIXED)
    pair.round({"f": 20, "a": 2, "b": 1, "c": 4, "d": 3, "e": 5}, MIXED)
    pair.round(dict.fromkeys("edcba", 2), MIXED)
    assert recorder.num_records == 1 and pair.paged.num_replays == 3
    assert not pair.captured.context.keys[:, : pair.captured.context.spare_row].isnan().any()


def test_what_lies_in_rows_of_nobody_is_never_read(recorder: TapeRecorder) -> None:
    pair = Pair(recorder)
    context = pair.captured.context
    for pool in (context.keys, context.values):
        pool.fill_(torch.nan)
    pair.round({"a": 12, "b": 3, "c": 30, "d": 2, "e": 6}, MIXED)
    pair.round({"a": 1, "d": 3, "b": 1, "c": 2, "e": 4}, MIXED)
    assert pair.paged.num_replays == 2


def test_each_tier_of_requests_and_context_is_captured_once(recorder: TapeRecorder) -> None:
    pair = Pair(recorder)
    pair.captured.context.cover_columns(1023)
    for added in ({"a": 9}, {"a": 2}, {"a": 1, "b": 4}, {"b": 1, "a": 3}, {"a": 600}, {"a": 2}):
        pair.round(added)
    # (1, 512), (2, 512), (1, 1024)
    assert recorder.num_records == 3
    assert pair.paged.num_replays == 6
    pair.round({"a": 1}, MIXED)
    assert recorder.num_records == 4  # a sampling draft computes more than a greedy one


def test_a_context_that_moved_is_captured_anew(recorder: TapeRecorder) -> None:
    pair = Pair(recorder)
    pair.round({"a": 400})
    pair.round({"a": 250})  # beyond 512 columns: the store grows
    pair.round({"a": 3})
    pair.round(pair.opened(20))  # beyond 16 rows
    pair.round({"a": 2})
    assert recorder.num_records == 4


def test_rotary_tables_that_grew_are_captured_anew(recorder: TapeRecorder) -> None:
    pair = Pair(recorder, max_position_embeddings=16)
    pair.round({"a": 5})
    pair.round({"a": 20})
    pair.round({"a": 3})
    assert recorder.num_records == 2


def test_more_requests_than_any_tier_are_drafted_for_uncaptured(
    recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_drafts, "MOST_CAPTURED_REQUESTS", 2)
    pair = Pair(recorder)
    pair.round({"a": 12, "b": 3, "c": 30}, MIXED)
    pair.round({"a": 1, "b": 3}, MIXED)
    assert pair.paged.num_replays == 1


class RefusingRecorder:
    def record(self, run: Any) -> Recorded[Any]:
        raise RuntimeError("operation not permitted when stream is capturing")

    def forget(self) -> None:
        pass


def test_a_failed_capture_is_counted_and_drafts_run_on(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(RefusingRecorder())
    pair.round({"a": 12, "b": 3}, MIXED)
    pair.round({"a": 1, "b": 3}, MIXED)
    assert pair.paged.num_capture_failures == 1 and pair.paged.num_replays == 0
    assert "drafts run uncaptured" in caplog.text


# --- the test of the tests ------------------------------------------------------------------------------------------

BROKEN = {
    "rows of the capture": (paged_drafts, "(self._tables, row[:, None] * self._kv_heads),", ""),
    "lengths of the capture": (paged_drafts, "(self._seen, np.repeat(last, size)),", ""),
    "columns of the capture": (
        paged_drafts, "(self._columns, count[:, None] + np.arange(size)),", "",
    ),
    "rows written at the capture": (paged_drafts, "(self._rows, row[:, None]),", ""),
    "anchors of the capture": (paged_drafts, "(self._ids, self._padded(anchor_ids, 0)),", ""),
    "positions of the capture": (paged_drafts, "(self._anchors, self._padded(anchors, 0)),", ""),
    "tiles of the capture": (
        paged_drafts, "self._tiles.copy_(torch.from_numpy(tiles), non_blocking=True)", "",
    ),
    "draws of the capture": (
        paged_drafts,
        "(self._sampling.noise_key, self._padded(sampling.noise_key.view(np.int64), 0)),", "",
    ),
    "rules of the capture": (
        paged_drafts, "(self._sampling.rule, self._padded(sampling.rule, RULE_GREEDY)),", "",
    ),
    "graphs kept after a move": (paged_drafts, "self._made.clear()", "pass"),
    "padding writes to row 0": (
        paged_drafts, "self._padded(rows, self._spare_row)", "self._padded(rows, 0)",
    ),
    "one key too few": (paged_drafts, "count + size - 1, -1)", "count + size - 2, -1)"),
    "one key too many": (paged_drafts, "count + size - 1, -1)", "count + size, -1)"),
    "moves not counted": (context_module, "self.num_moves += 1", "pass"),
    "table moves not counted": (packed_backbone, "self.num_moves += 1", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_stale_buffers_are_found(
    recorder: TapeRecorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old, new = BROKEN[name]
    broken = mutant(module, old, new)
    from actors.engine.drafters import engine as engine_module

    for owner in (engine_module, paged_drafts):
        for found in ("PagedDrafts", "ContextStore", "PackedBackbone"):
            if hasattr(broken, found) and hasattr(owner, found):
                monkeypatch.setattr(owner, found, getattr(broken, found))
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        _everything_that_can_go_stale(recorder)


def _everything_that_can_go_stale(recorder: TapeRecorder) -> None:
    pair = Pair(recorder)
    poison(pair.captured)
    pair.round({"a": 12, "b": 3, "c": 30, "d": 4, "e": 6}, MIXED)
    pair.round({"b": 3, "c": 1, "a": 5, "d": 1, "e": 1}, MIXED[::-1])
    pair.round({"a": 400, "b": 1, "c": 1, "d": 1, "e": 2}, MIXED)
    pair.round({"a": 200, "b": 1, "c": 1, "d": 1, "e": 2}, MIXED)
    pair.round({"c": 1, "b": 1, "a": 1, "d": 2, "e": 1}, MIXED)
    pair.round(pair.opened(20))
    pair.round({"c": 1, "b": 1, "a": 1, "d": 2, "e": 1}, MIXED)
    short = Pair(recorder, max_position_embeddings=16)
    short.round({"a": 5})
    short.round({"a": 20})


def poison(engine: DSparkEngine) -> None:
    for pool in (engine.context.keys, engine.context.values):
        pool.fill_(torch.nan)
