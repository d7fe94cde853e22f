"""Linear layers with weights laid out once for oneDNN: same bits as the ordinary one, faster at few rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]
PACK_ROWS = 16  # the row count oneDNN lays the weights out for; they serve every other count too


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return x [..., in] -> x @ weight.T (+ bias) for weight [out, in].

    Only bf16 on CPU gains from packing; other dtypes and devices get the ordinary linear.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return lambda x: F.linear(x, weight, bias)
    mkldnn = torch.ops.mkldnn
    packed = mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)

    def run(x: Tensor) -> Tensor:
        out: Tensor = mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return run
