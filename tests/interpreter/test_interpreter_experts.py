"""The expert kernels equal their twins: order, products of any group sizes, weighted sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import grouped_gemm, token_permute
from kernels.device import experts

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}
DTYPES = st.sampled_from(list(TOLERANCE))


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 3), st.integers(1, 40), DTYPES)
def test_kernels_permute_and_combine_like_their_twins(
    num_tokens: int, num_experts: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(num_tokens + 31 * num_experts)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=rng)
    found, wanted = (
        experts.permutation(ids, num_experts),
        token_permute.permutation(ids, num_experts),
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    tokens = torch.randn(num_tokens, width, generator=rng).to(dtype)
    copies = experts.permute(tokens, found)
    assert torch.equal(copies, token_permute.permute(tokens, wanted))
    weights = torch.rand(num_tokens, top_k, generator=rng).to(dtype)
    done = experts.combine(copies, weights, found).float()
    twin = token_permute.combine(copies.float(), weights.float(), wanted)
    assert (done - twin).abs().max() <= TOLERANCE[dtype] if num_tokens else done.shape == twin.shape


def test_kernel_sorts_in_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "COPY_TILE", 16)
    ids = torch.randint(0, 5, (37, 2), generator=torch.Generator().manual_seed(0))
    found, wanted = experts.permutation(ids, 5), token_permute.permutation(ids, 5)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from([0, 1, 2, 15, 64, 70]), min_size=1, max_size=4),
    st.sampled_from([(16, 24), (70, 65), (1, 3)]),
    st.booleans(),
    DTYPES,
)
def test_kernel_multiplies_each_group_by_its_expert(
    counts: list[int], sizes: tuple[int, int], gated: bool, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(sum(counts))
    width_in, width_out = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).mul(width_in**-0.5).to(dtype)

    rows = random(sum(counts), width_in)
    weights = random(len(counts), width_out, width_in)
    up = random(len(counts), width_out, width_in) if gated else None
    group_sizes = torch.tensor(counts)
    found = experts.grouped_linear(rows, group_sizes, weights, up).float()
    wanted = grouped_gemm.grouped_linear(rows, group_sizes, weights, up).float()
    assert found.shape == wanted.shape
    assert not len(rows) or (found - wanted).abs().max() <= TOLERANCE[dtype]
