"""Norm, rotation and K/V write in one kernel equal the twin, and touch no other slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import rope_store as twin
from kernels.device import rope_store as device

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def inputs(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, has_norm: bool
) -> tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    rng = torch.Generator().manual_seed(tokens + dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=rng).to(dtype)
    norm = torch.rand(heads + kv_heads, dim, generator=rng) + 0.5 if has_norm else None
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2, generator=rng))
    rotation = torch.polar(torch.ones_like(angles), angles)
    positions = torch.randint(0, 50, (tokens,), generator=rng)
    slots = torch.randperm(tokens + 5, generator=rng)[:tokens]
    pool = torch.full((2 * kv_heads, tokens + 5, dim), torch.nan, dtype=dtype)
    return qkv, norm, rotation, positions, slots, pool


def check(dtype: torch.dtype, arguments: tuple[torch.Tensor | None, ...]) -> None:
    qkv, norm, rotation, positions, slots, pool = arguments
    ours, theirs = pool.clone(), pool.clone()
    found = device.rope_store(qkv, norm, 1e-6, rotation, positions, slots, ours, 0.25)
    wanted = twin.rope_store(qkv, norm, 1e-6, rotation, positions, slots, theirs, 0.25)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(ours.isnan(), theirs.isnan())
    torch.testing.assert_close(
        ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True
    )


@settings(deadline=None, max_examples=12)
@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([1, 3]),
    st.sampled_from([2, 16, 24]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
)
def test_kernel_equals_twin_over_shapes(
    tokens: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype, has_norm: bool
) -> None:
    check(dtype, inputs(tokens, kv_heads * group, kv_heads, dim, dtype, has_norm=has_norm))


@pytest.mark.parametrize("padded", [0, 2])
def test_kernel_stores_nothing_for_a_token_that_pads_the_step(padded: int) -> None:
    arguments = inputs(3, 3, 1, 16, torch.float32, has_norm=True)
    arguments[4][padded] = -1
    check(torch.float32, arguments)
