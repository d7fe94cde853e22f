"""Position-keyed random bits inside a kernel: the same as `kernels.noise`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from actors.core.sampling import ELEMENT_MIX, KEY_MIX, UNIFORM_BITS
from actors.core.sampling import PURPOSE_BITS as _PURPOSE_BITS

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1

PURPOSE_BITS = tl.constexpr(_PURPOSE_BITS)
KEY_ADD = tl.constexpr(KEY_MIX.first_add & _MASK_64)
KEY_SHIFT_0, KEY_SHIFT_1 = (tl.constexpr(shift) for shift, _ in KEY_MIX.rounds)
KEY_TIMES_0, KEY_TIMES_1 = (tl.constexpr(times & _MASK_64) for _, times in KEY_MIX.rounds)
KEY_LAST = tl.constexpr(KEY_MIX.last_shift)
UNIFORM_SHIFT = tl.constexpr(64 - UNIFORM_BITS)
UNIFORM_UNIT = tl.constexpr(2.0**-UNIFORM_BITS)
SPREAD = tl.constexpr(ELEMENT_MIX.spread & _MASK_32)
SHIFT_0, SHIFT_1, SHIFT_2 = (tl.constexpr(shift) for shift, _ in ELEMENT_MIX.rounds)
TIMES_0, TIMES_1, TIMES_2 = (tl.constexpr(times & _MASK_32) for _, times in ELEMENT_MIX.rounds)
ELEMENT_LAST = tl.constexpr(ELEMENT_MIX.last_shift)
BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
HALF_UNIT = tl.constexpr(2.0**-31)


@triton.jit
def _mix(x):
    x = (x ^ (x >> KEY_SHIFT_0)) * tl.full([], KEY_TIMES_0, tl.uint64)
    x = (x ^ (x >> KEY_SHIFT_1)) * tl.full([], KEY_TIMES_1, tl.uint64)
    return x ^ (x >> KEY_LAST)


@triton.jit
def row_hash(key, position, purpose):
    """64 mixed bits of (noise key int64, position, purpose), as uint64; shapes broadcast."""
    counter = (position.to(tl.int64) << PURPOSE_BITS) + purpose
    x = _mix(key.to(tl.uint64, bitcast=True) + tl.full([], KEY_ADD, tl.uint64))
    return _mix(x + counter.to(tl.uint64, bitcast=True))


@triton.jit
def uniform(key, position, purpose):
    """The scalar draw of (key, position, purpose): float64 in (0, 1)."""
    bits = row_hash(key, position, purpose) >> UNIFORM_SHIFT
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * UNIFORM_UNIT


@triton.jit
def token_uniform(row, token_ids):
    """float32 uniforms of (row hash of purpose 0, token ids), shapes broadcast."""
    low = row.to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    x = (token_ids.to(tl.uint32) * tl.full([], SPREAD, tl.uint32)) ^ low
    x = (x ^ (x >> SHIFT_0)) * tl.full([], TIMES_0, tl.uint32) + high
    x = (x ^ (x >> SHIFT_1)) * tl.full([], TIMES_1, tl.uint32)
    x = (x ^ (x >> SHIFT_2)) * tl.full([], TIMES_2, tl.uint32)
    x = (x ^ (x >> ELEMENT_LAST)) & 0x7FFFFFFF
    return tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * HALF_UNIT, BELOW_ONE)


@triton.jit
def exponential(row, token_ids):
    """Unit exponentials -log(1 - u), float32.

    In float64 inside: the fast float32 logarithm of the hardware loses the small values that decide a race.
    """
    u = token_uniform(row, token_ids).to(tl.float64)
    return (-tl.log(1.0 - u)).to(tl.float32)
