"""The paged attention kernel equals its torch twin, wherever a row's blocks lie and whatever lies in the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.device import attention
from kernels.paged_attention import PagedLayout, PagedShape, attend_paged, cut_tiles, paged_layout
from kernels.ragged_attention import RaggedRows

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """Rows of (context, query) over shuffled blocks; every free block and every free slot is not a number."""

    spans: tuple[tuple[int, int], ...]
    group: int = 3
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16
    window: int = 0
    split_keys: int = 512
    tile_rows: int = 16
    dtype: torch.dtype = torch.float32

    def made(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedLayout]:
        rng = torch.Generator().manual_seed(7)
        lengths = [c + q for c, q in self.spans]
        width = max(-(-n // self.block_size) for n in lengths) + 1
        dealt = np.random.default_rng(3).permutation(width * len(lengths) + 3)
        tables = dealt[: width * len(lengths)].reshape(len(lengths), width)
        pool = torch.full(
            (2 * self.kv_heads, len(dealt) * self.block_size, self.dim), torch.nan, dtype=self.dtype
        )
        for table, length in zip(tables, lengths, strict=True):
            at = np.arange(length)
            slots = torch.from_numpy(
                table[at // self.block_size] * self.block_size + at % self.block_size
            )
            filled = torch.randn(2 * self.kv_heads, length, self.dim, generator=rng)
            pool[:, slots] = filled.to(self.dtype)
        tokens = sum(q for _, q in self.spans)
        queries = torch.randn(tokens, self.kv_heads * self.group, self.dim, generator=rng)
        rows = RaggedRows(
            np.cumsum([0, *(q for _, q in self.spans)]),
            np.concatenate([np.arange(c, c + q) for c, q in self.spans]),
            np.array(lengths),
            tables,
        )
        splits = -(-max(lengths) // self.split_keys)
        shape = PagedShape(self.tile_rows, self.split_keys, splits)
        layout = paged_layout(rows, shape, self.group, self.block_size, CPU, self.window)
        keys, values = pool.chunk(2)
        return (queries * self.dim**-0.5).to(self.dtype), keys, values, layout

    def check(self) -> None:
        made = self.made()
        found, wanted = attention.attend_paged(*made), attend_paged(*made)
        assert torch.isfinite(found).all()
        assert (found.float() - wanted.float()).abs().max() <= TOLERANCE[self.dtype] * 4


def ordered_dot(
    builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
) -> TensorHandle:
    terms = a.data[:, :, None] * b.data[None]
    return TensorHandle(terms.sum(1) + d.data, d.dtype.scalar)


spans = st.tuples(st.integers(0, 70), st.integers(0, 7)).filter(lambda s: sum(s) > 0)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(spans, min_size=1, max_size=3).filter(lambda rows: any(q for _, q in rows)),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 16]),
    st.sampled_from([0, 1, 9, 64]),
    st.sampled_from([64, 512]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_kernel_equals_twin_over_shapes(
    rows: list[tuple[int, int]],
    group: int,
    block_size: int,
    window: int,
    split_keys: int,
    dtype: torch.dtype,
) -> None:
    step = Step(tuple(rows), group=group, block_size=block_size, window=window, dtype=dtype)
    replace(step, split_keys=split_keys).check()


def test_kernel_reads_long_contexts_in_splits() -> None:
    Step(((150, 2), (3, 1), (63, 2)), split_keys=64, block_size=1).check()


def test_kernel_serves_one_row_odd_heads_and_wide_tiles() -> None:
    Step(((0, 1),), group=3, kv_heads=3, dim=24).check()
    Step(((4, 9),), group=1, kv_heads=1, tile_rows=64).check()


def test_kernel_gives_a_token_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone as a decode token, within a round, beside longer rows and with more splits.

    The interpreter multiplies with BLAS, whose order depends on the row; a tensor core's does not.
    """
    monkeypatch.setattr(InterpreterBuilder, "create_dot", ordered_dot)
    wide = Step(((100, 6), (17, 2), (190, 1)), split_keys=64, tile_rows=64)
    queries, *kv, layout = wide.made()
    together = attention.attend_paged(queries, *kv, layout)
    for token in (0, 3, 5, 7):
        row = 0 if token < 6 else 1
        alone = replace(
            layout,
            tiles=torch.tensor([[0, 1, row]], dtype=torch.int32),
            positions=layout.positions[token : token + 1],
            shape=replace(layout.shape, num_splits=int(layout.positions[token]) // 64 + 1),
        )
        found = attention.attend_paged(queries[token : token + 1], *kv, alone)
        assert torch.equal(found[0], together[token])


def test_kernel_leaves_padding_tokens_alone() -> None:
    queries, *kv, layout = Step(((5, 3),), split_keys=64).made()
    padded = replace(
        layout,
        tiles=torch.from_numpy(cut_tiles(np.array([0, 3]), 5, num_tiles=4)),
        positions=torch.tensor([5, 6, 7, -1, -1], dtype=torch.int32),
    )
    more = torch.cat([queries, torch.full_like(queries[:2], torch.nan)])
    for splits in (1, 2):
        shape = replace(layout.shape, num_splits=splits)
        found = attention.attend_paged(more, *kv, replace(padded, shape=shape))
        assert torch.equal(found[:3], attention.attend_paged(queries, *kv, layout))
        assert (found[3:] == 0).all()


def test_kernel_reads_heads_that_lie_apart() -> None:
    """As a drafter's context has them: [rows, heads, columns, dim], a row a block, every slot sees up to the last."""
    heads, columns, dim, group = 2, 32, 16, 3
    rng = torch.Generator().manual_seed(0)
    pools = [torch.randn(4, heads, columns, dim, generator=rng) for _ in range(2)]
    slots = (3 * heads + 1) * columns
    keys, values = (p.as_strided((heads, slots, dim), (columns * dim, dim, 1)) for p in pools)
    rows, lasts = torch.tensor([3, 0, 2]), [20, 7, 31]
    queries = torch.randn(12, heads * group, dim, generator=rng)
    layout = PagedLayout(
        torch.from_numpy(cut_tiles(np.array([0, 4, 8, 12]), 5)),
        torch.tensor(lasts, dtype=torch.int32).repeat_interleave(4),
        (rows * heads).int()[:, None],
        columns,
        PagedShape(16, 512, 1),
    )
    found = attention.attend_paged(queries, keys, values, layout)
    assert (found - attend_paged(queries, keys, values, layout)).abs().max() < 1e-5
    for i, (row, last) in enumerate(zip(rows, lasts, strict=True)):
        own = queries[4 * i : 4 * i + 4].view(4, heads, group, dim)
        k, v = (p[row, :, : last + 1] for p in pools)
        weights = torch.einsum("qhgd,hkd->qhgk", own, k).softmax(-1)
        wanted = torch.einsum("qhgk,hkd->qhgd", weights, v).reshape(4, -1)
        assert (found[4 * i : 4 * i + 4] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize(("queries", "tokens"), [([1, 1], 4), ([6, 0, 9], 4), ([0], 2), ([90], 21)])
def test_kernel_tiles_cover_every_token_once(queries: list[int], tokens: int) -> None:
    cu = np.cumsum([0, *queries])
    tiles = cut_tiles(cu, tokens)
    covered = [(t, row) for first, n, row in tiles.tolist() for t in range(first, first + n)]
    assert covered == [(t, r) for r in range(len(queries)) for t in range(cu[r], cu[r + 1])]
    assert (tiles[:, 1] <= tokens).all()
