"""Sizes that decode steps are padded to, so that a captured step can be replayed.

A tier depends on the number of rows and on the lagged budget alone. Were it chosen by the tokens that current survivals
admit, the time of a step would tell something of drafts not yet verified, and lagged curves would be fitted to it (C3).
"""

from __future__ import annotations

from bisect import bisect_left


def token_tiers(max_tokens: int) -> tuple[int, ...]:
    """Powers of two and the middles between them, up to `max_tokens`: padding is at most half of a step.

    Raises ValueError when max_tokens is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} is below 1; a step has at least one token")
    sizes, size = {max_tokens}, 1
    while size < max_tokens:
        sizes.add(size)
        if size % 2 == 0 and size + size // 2 < max_tokens:
            sizes.add(size + size // 2)
        size *= 2
    return tuple(sorted(sizes))


def tier_for(token_bound: int, tiers: tuple[int, ...]) -> int | None:
    """The smallest tier that holds `token_bound` tokens (rows plus lagged budget); None: no tier is large enough."""
    index = bisect_left(tiers, token_bound)
    return tiers[index] if index < len(tiers) else None


def context_tier(num_tokens: int) -> int:
    """The power of two, from 512 on, that holds a context of `num_tokens`: what a captured draft is cut for."""
    return max(512, 1 << max(num_tokens - 1, 0).bit_length())
