"""Root mean square normalisation (Zhang and Sennrich 2019) in few operations, which is what counts for few rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, computed in fp32.

    Written with lengths, x / sqrt(|x| ** 2 + d eps) * (sqrt(d) weight), it is a norm, a hypotenuse, a division and a
    product: a third faster than `torch.rms_norm` on CPU. On a GPU that one is a single kernel with a row a block; a
    reduction of torch's would group its sums by the number of rows.

    Args:
        weight: [d], or [..., d] for a weight of its own for each of several vectors.
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._own, self._eps = weight, eps
        self.weight = weight.float()  # for kernels that normalise on their way
        self._scaled = self.weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and self._own.dim() == 1:
            return torch.rms_norm(x, self._own.shape, self._own, self._eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(self._floor)
        return torch.div(wide, length).mul_(self._scaled).to(x.dtype)
