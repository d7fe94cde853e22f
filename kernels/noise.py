"""Counter-based noise in torch: the twin of `actors.core.sampling`, bit for bit. CPU or CUDA.

Every draw is a function of (noise key, absolute position of the token it decides, purpose) alone, so a result depends
neither on the rest of the batch nor on what was drawn before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.core.sampling import ELEMENT_MIX, KEY_MIX, PURPOSE_BITS, PURPOSE_TOKEN, UNIFORM_BITS

# Of a [rows, vocab] hash on CPU: its buffers stay in the second-level cache.
_CHUNK_ELEMENTS = 1 << 16
_ARGMAX_BLOCKS = (512, 256, 128, 64, 32)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch has only the arithmetic one for signed integers."""
    width = x.element_size() * 8
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _row_hash(keys: Tensor, positions: Tensor, purpose: int | Tensor) -> Tensor:
    """64 mixed bits for each (key, position, purpose), as int64. Shapes broadcast."""
    counter = (positions.long() << PURPOSE_BITS) + purpose
    x = keys
    for add in (KEY_MIX.first_add, counter):
        x = x + add
        for shift, multiplier in KEY_MIX.rounds:
            x = (x ^ _shift_right(x, shift)) * multiplier
        x = x ^ _shift_right(x, KEY_MIX.last_shift)
    return x


def uniform(keys: Tensor, positions: Tensor, purpose: int | Tensor) -> Tensor:
    """One uniform in the open interval (0, 1) for each (key, position, purpose), float64; shapes broadcast.

    `keys` are the 64-bit noise keys viewed as int64.
    """
    bits = _shift_right(_row_hash(keys, positions, purpose), 64 - UNIFORM_BITS)
    return (bits.double() + 0.5) * 2.0**-UNIFORM_BITS


def _element_uniform(row: Tensor, spread_ids: Tensor) -> Tensor:
    """float32 uniforms in (0, 1) of (row hash [n, 1], token ids times a constant [n or 1, m] int32), in place."""
    low = row.to(torch.int32)
    high = (row >> 32).to(torch.int32)
    x = spread_ids ^ low
    y = torch.empty_like(x)
    for step, (shift, multiplier) in enumerate(ELEMENT_MIX.rounds):
        torch.bitwise_right_shift(x, shift, out=y)
        x.bitwise_xor_(y.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
        if step == 0:
            x.add_(high)
    torch.bitwise_right_shift(x, ELEMENT_MIX.last_shift, out=y)
    x.bitwise_xor_(y.bitwise_and_((1 << (32 - ELEMENT_MIX.last_shift)) - 1)).bitwise_and_(
        0x7FFFFFFF
    )
    # 31 bits keep the smallest values exact (they decide a race); rounding up to 1.0 must not give an infinite time.
    return x.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)


def token_uniforms(keys: Tensor, positions: Tensor, token_ids: Tensor | int) -> Tensor:
    """Uniforms behind the shared noise, float32 [n, m].

    Args:
        keys, positions: [n].
        token_ids: [n, m] support, or the vocabulary size for every token. A token's value is the same either way.
    """
    row = _row_hash(keys, positions, PURPOSE_TOKEN)[:, None]
    if isinstance(token_ids, int):
        token_ids = torch.arange(token_ids, device=keys.device)[None]
    return _element_uniform(row, token_ids.to(torch.int32) * ELEMENT_MIX.spread)


def exponential_noise(keys: Tensor, positions: Tensor, token_ids: Tensor | int) -> Tensor:
    """Unit exponentials E of each (row, token), float32 [n, m]: argmax(p / E) is argmax(log p + Gumbel)."""
    return token_uniforms(keys, positions, token_ids).neg_().log1p_().neg_()


def gumbel_noise(keys: Tensor, positions: Tensor, token_ids: Tensor | int) -> Tensor:
    """Gumbel noise g = -log(E) of each (row, token), float32 [n, m]; arguments as in `token_uniforms`."""
    return exponential_noise(keys, positions, token_ids).log_().neg_()


def coupled_argmax(probs: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """argmax over the whole vocabulary of log p + g(key, position), as p / E: one logarithm a token.

    Args:
        probs: [n, V]; need not be normalised.
        keys, positions: [n].
    """
    num_rows, vocab = probs.shape
    rows = num_rows if probs.is_cuda else max(1, _CHUNK_ELEMENTS // vocab)
    spread = torch.arange(vocab, device=probs.device, dtype=torch.int32)[None] * ELEMENT_MIX.spread
    row_hash = _row_hash(keys, positions, PURPOSE_TOKEN)[:, None]
    tokens = torch.empty(num_rows, dtype=torch.long, device=probs.device)
    for start in range(0, num_rows, max(rows, 1)):
        chunk = slice(start, start + rows)
        time = _element_uniform(row_hash[chunk], spread).neg_().log1p_().neg_()
        tokens[chunk] = first_argmax(probs[chunk] / time)
    return tokens


def first_argmax(x: Tensor) -> Tensor:
    """argmax of each row [n, V], the first one of equals.

    Maxima of blocks come first, because torch vectorises those on CPU and argmax not.
    """
    num_rows, width = x.shape
    block = next((size for size in _ARGMAX_BLOCKS if width % size == 0 and width >= 4 * size), 0)
    if not block or not num_rows:
        return x.argmax(-1)
    blocks = x.reshape(num_rows, width // block, block)
    best = blocks.amax(-1).argmax(-1)
    inner = blocks.gather(1, best[:, None, None].expand(-1, 1, block))[:, 0].argmax(-1)
    return best * block + inner
