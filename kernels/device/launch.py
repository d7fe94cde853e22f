"""What every launcher needs to know: whether kernels are interpreted, and sizes that compile."""

from __future__ import annotations

import torch
import triton

# Decided when the kernels are decorated: TRITON_INTERPRET must be set before this package is imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def widens(dtype: torch.dtype) -> bool:
    """Whether a product must be computed from widened operands: the interpreter multiplies the bits of bfloat16."""
    return INTERPRETED and dtype == torch.bfloat16


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())
