"""The short way to normalise is the normal way."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import RmsNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 16)])
def test_it_is_the_textbook_formula(
    dtype: torch.dtype, tolerance: float, scale: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * scale).to(dtype)
    weight = (torch.randn(shape[1:], generator=generator) + 2).to(dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    kept = x.clone()
    found = RmsNorm(weight, 1e-5)(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wanted, rtol=tolerance, atol=tolerance * 1e-3)
    assert torch.equal(x, kept)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))
