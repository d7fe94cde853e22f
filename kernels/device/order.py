"""Numbers that sort like (value, then the smaller index first), for tops and argmaxima without ties."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def ordered_bits(values):
    """int32 in the order of the float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def packed(values, index):
    """int64 that orders float32 values upwards and, among equals, indices downwards."""
    return (ordered_bits(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def value_of(number):
    """The float32 in a packed number."""
    bits = (number >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(number):
    """The index in a packed number."""
    return 0x7FFFFFFF - (number & 0x7FFFFFFF).to(tl.int32)
