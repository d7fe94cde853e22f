"""One function per expert, each on its own contiguous rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Expert = Callable[[Tensor], Tensor]


def grouped_apply(
    rows: Tensor, counts: Sequence[int], experts: Sequence[Expert], min_rows: int = 1
) -> Tensor:
    """Apply experts[e] to its counts[e] rows; rows [n, d] are sorted by expert. Returns [n, d_out], of no rows [0, d].

    `min_rows` repeats a lone row, where a product of one row is computed differently from that of many.
    """
    assert sum(counts) == len(rows), f"{sum(counts)} rows counted, {len(rows)} given"
    outputs, start = [], 0
    for expert, count in zip(experts, counts, strict=True):
        if not count:
            continue
        own = rows[start : start + count]
        if count < min_rows:
            own = own.expand(min_rows, -1).contiguous() if count == 1 else own
        outputs.append(expert(own)[:count])
        start += count
    return torch.cat(outputs) if outputs else rows.new_empty(rows.shape)


def grouped_linear(
    rows: Tensor, counts: Tensor, weights: Tensor, up: Tensor | None = None
) -> Tensor:
    """rows[i] @ weights[e].T for the counts[e] rows of each expert e; with `up`, silu of that times rows[i] @ up[e].T.

    The torch twin of the grouped product. Rows [n, in] are sorted by expert, weights and up are [E, out, in].
    """
    gated = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        own = rows[start : start + count].float()
        start += count
        done = own @ weights[expert].float().T
        if up is not None:
            done = torch.nn.functional.silu(done) * (own @ up[expert].float().T)
        gated.append(done)
    return torch.cat(gated).to(rows.dtype)
