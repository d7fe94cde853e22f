"""Changed logits and their logarithms, for the few rows of a step that ask for them. CPU or CUDA, plain torch.

Everything here works row by row and element by element, so a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.core.logit_edits import LogitEdits
from kernels.reference import largest


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """Apply `edits` in place to logits [L, V], in their own precision."""
    device = logits.device
    rows, token_ids = (torch.from_numpy(a).to(device) for a in (edits.rows, edits.token_ids))
    factors, addends = (
        torch.from_numpy(a).to(device, logits.dtype) for a in (edits.factors, edits.addends)
    )
    old = logits[rows, token_ids]
    logits[rows, token_ids] = torch.where(old > 0, old / factors, old * factors) + addends


def mask_logits(logits: Tensor, rows: npt.NDArray[np.int64], masks: npt.NDArray[np.int32]) -> None:
    """Forbid in place, in the rows [n] of logits [L, V], every token whose bit is not set in masks [n, ceil(V / 32)].

    Bit b of word w stands for token 32 w + b.
    """
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    index = torch.from_numpy(rows).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax(logits [n, V]) of one token a row [n], and of the `num_top` largest: ids and values [n, num_top]."""
    logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    own = logprobs.gather(1, token_ids[:, None])[:, 0]
    values, ids = largest(logprobs, min(num_top, logprobs.shape[1]))
    return own, ids, values
