"""Ragged attention over paged K/V against one plain attention a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import ragged_attention
from kernels.kv_store import KvStore
from kernels.ragged_attention import Tiling, attend, attention_layout, ragged_rows

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4
CPU = torch.device("cpu")
# (context, query) of each row
STEPS = {
    "decode": [(3, 1), (40, 1), (0, 1)],
    "ragged rounds": [(3, 6), (40, 1), (17, 3), (8, 2)],
    "a long prompt beside decoding rows": [(5, 1), (0, 90), (33, 4), (12, 1)],
    "several chunk sizes": [(0, 9), (64, 17), (2, 33), (7, 9), (100, 1)],
    "a long context beside short ones": [(900, 2), (5, 2), (700, 1), (9, 1)],
}


@dataclass
class Case:
    """Random K/V of each row, stored over shuffled blocks."""

    spans: list[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    window: int = 0

    def __post_init__(self) -> None:
        lengths = [context + query for context, query in self.spans]
        generators = [torch.Generator().manual_seed(row) for row in range(len(lengths))]
        self.keys_values = [
            torch.randn((n, 2 * KV_HEADS, DIM), generator=g).to(self.dtype)
            for n, g in zip(lengths, generators, strict=True)
        ]
        queries = [
            torch.randn((query, HEADS, DIM), generator=g) * DIM**-0.5
            for (_, query), g in zip(self.spans, generators, strict=True)
        ]
        self.queries = torch.cat(queries).to(self.dtype)
        width = max(-(-n // BLOCK) for n in lengths)
        total = width * len(lengths)
        self.store = KvStore(1, KV_HEADS, DIM, total, BLOCK, self.dtype, CPU)
        dealt = np.random.default_rng(1).permutation(total).astype(np.int32)
        self.block_tables = dealt.reshape(len(lengths), width)
        self.fill()

    def fill(self) -> None:
        for table, rows in zip(self.block_tables, self.keys_values, strict=True):
            at = np.arange(len(rows))
            self.store.write(
                0, torch.from_numpy(table[at // BLOCK] * BLOCK + at % BLOCK).long(), rows
            )

    def found(self, tiling: Tiling) -> Tensor:
        queries = [query for _, query in self.spans]
        rows = ragged_rows(
            np.cumsum([0, *queries]).astype(np.int32),
            np.concatenate([np.arange(c, c + q) for c, q in self.spans]).astype(np.int32),
            np.array([c for c, _ in self.spans], np.int32),
            self.block_tables,
        )
        like = torch.zeros(0, dtype=self.dtype)
        layout = attention_layout(rows, self.store, HEADS // KV_HEADS, tiling, like, self.window)
        return attend(self.queries, self.store, 0, layout)

    def wanted(self) -> Tensor:
        out, start = [], 0
        for (context, query), stored in zip(self.spans, self.keys_values, strict=True):
            own = self.queries[start : start + query].double()
            start += query
            keys, values = stored.double().split(KV_HEADS, dim=1)
            keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", own, keys)
            own_place, key = (
                torch.arange(context, context + query)[:, None],
                torch.arange(context + query),
            )
            hidden = key > own_place
            if self.window:
                hidden |= key <= own_place - self.window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, values).reshape(query, -1))
        return torch.cat(out)


@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("reproducible", [True, False])
@pytest.mark.parametrize("window", [0, 1, 7, 64, 5000])
def test_every_row_attends_to_its_own_past(
    spans: list[tuple[int, int]], reproducible: bool, window: int
) -> None:
    case = Case(spans, window=window)
    tiling = Tiling.of(torch.float32, reproducible=reproducible)
    assert (case.found(tiling) - case.wanted()).abs().max() < 1e-5


def test_bfloat16_rounds_only() -> None:
    case = Case(STEPS["several chunk sizes"], torch.bfloat16)
    found = case.found(Tiling.of(torch.bfloat16, reproducible=True))
    assert (found.double() - case.wanted()).norm() / case.wanted().norm() < 0.01


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [(5, 1), (200, 1), (300, 6), (130, 2)])
def test_a_row_gets_the_same_bits_in_any_company(
    first: tuple[int, int], dtype: torch.dtype, window: int
) -> None:
    """Longer neighbours pad its context, longer queries its products, and it may itself be part of a longer query."""
    tiling = Tiling.of(dtype, reproducible=True)
    context, query = first
    alone = Case([first], dtype, window).found(tiling)
    for others in ([(200, 1)], [(380, 3), (7, 1)], [(450, 1)] * 9, [(0, 40), (12, 6)]):
        beside = Case([first, *others], dtype, window).found(tiling)
        assert torch.equal(beside[:query], alone), others
    # The same tokens as the last ones of a longer query; its own random numbers come first in both cases.
    longer = Case([(0, context + query)], dtype, window)
    shorter = Case([first], dtype, window)
    shorter.keys_values = longer.keys_values
    shorter.queries = longer.queries[context:]
    shorter.fill()
    assert torch.equal(longer.found(tiling)[context:], shorter.found(tiling))


def test_blocks_before_every_window_of_a_row_are_not_read() -> None:
    """Their owner may have given them back: here they are not numbers."""
    case = Case([(900, 2), (40, 3), (5, 1)], window=10)
    want = case.found(Tiling())
    for row, first in ((0, 900 - 9), (1, 40 - 9)):
        gone = torch.from_numpy(case.block_tables[row][: first // BLOCK].astype(np.int64))
        slots = (gone[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        case.store.pool(0)[:, slots] = torch.nan
    assert torch.equal(case.found(Tiling()), want)


@pytest.mark.parametrize("context", [600, 1024, 1300])
def test_long_sums_in_bfloat16_do_not_depend_on_the_padding(context: int) -> None:
    """Over more than 1024 keys one product would round one result in ten thousand differently, hence so many."""
    tile = Tiling.of(torch.bfloat16, reproducible=True).key_tile
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100, 18, context, generator=generator).softmax(-1).bfloat16()
    values = torch.randn(100, 2048, 64, generator=generator).bfloat16()
    alone = ragged_attention._weighted_sum(weights, values[:, :context].contiguous(), tile)
    for span in (1536, 2016, 2048):
        padded = torch.zeros(100, 18, span, dtype=torch.bfloat16)
        padded[..., :context] = weights
        beside = ragged_attention._weighted_sum(padded, values[:, :span].contiguous(), tile)
        assert torch.equal(beside, alone), span
    exact = weights.double() @ values[:, :context].double()
    assert (alone.double() - exact).abs().max() < 0.01 * exact.abs().max()


def test_short_rows_do_not_pay_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products grow with the padded queries times the padded context: 15 decode rows beside a chunk stay small."""
    sizes = []
    honest = torch.bmm

    def counted(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(a.shape[0] * a.shape[1] * b.shape[2])
        return honest(a, b)

    monkeypatch.setattr(ragged_attention.torch, "bmm", counted)
    Case([(100, 1)] * 15 + [(0, 128)]).found(Tiling())
    padded_together = 2 * 16 * HEADS * 128 * 128
    assert sum(sizes) < padded_together / 5


def test_blocks_are_copied_whole_in_every_layer() -> None:
    store = KvStore(2, KV_HEADS, DIM, 4, BLOCK, torch.float32, CPU)
    rows = torch.randn(2 * BLOCK, 2 * KV_HEADS, DIM)
    for layer in range(2):
        store.write(layer, torch.arange(2 * BLOCK), rows + layer)
    store.copy_blocks(np.array([1, 0], np.int32), np.array([2, 3], np.int32))
    for layer in range(2):
        keys, values = store.read(layer, store.rows_of(torch.tensor([3, 2])))
        assert torch.equal(torch.cat([keys, values]), (rows + layer).transpose(0, 1))
