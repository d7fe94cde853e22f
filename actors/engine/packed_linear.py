"""Linear layers whose weights are laid out once for the machine, with what follows them fused in.

On CPU, oneDNN multiplies from weights reordered at load (a quarter to a third faster at few rows; in fp32 up to twice),
and applies SiLU, a product or a residual sum to the result while it is hot. In bf16 and in fp32 it gives a row the same
bits whatever other rows are there, except that a lone row takes another path, which rounds one result in ten thousand
differently: hence `min_rows`. In bf16 on a CPU with AMX few rows are summed in another order than many: hence
`BlockLinear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.machine import has_tile_products
from kernels import dispatch

PACK_ROWS = 16  # rows the layout is chosen for; it serves any number
# Up to 36 rows were seen to be summed otherwise than 64 and more; above MAX_BLOCK_ROWS nobody looked.
BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 256

Numerics = Literal["reproducible", "fast"]
Biases = tuple[Tensor | None, Tensor | None, Tensor | None]  # gate, up, down
NO_BIASES: Biases = (None, None, None)


def min_rows(numerics: Numerics) -> int:
    """Rows every product must have so that a row's bits do not depend on how many there are."""
    return 2 if numerics == "reproducible" else 1


def packs(weight: Tensor) -> bool:
    """Whether oneDNN computes this weight: fp32 and bf16 on CPU, where this build and machine can."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Linear:
    """x [M, in] -> x @ weight.T + bias, for weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.is_packed = packs(weight)
        self._weight = weight.contiguous()
        if self.is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACK_ROWS)
            self._unary = torch.ops.mkldnn._linear_pointwise.default
            self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if self.is_packed:
            out: Tensor = self._unary(x, self._weight, self.bias, "none", [], "")
            return out
        return self._product(x)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the result."""
        if self.is_packed:
            out: Tensor = self._unary(x, self._weight, self.bias, "swish", [], "")
            return out
        return F.silu(self._product(x))

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The result times `factor` [M, out]."""
        if self.is_packed:
            out: Tensor = self._binary(x, factor, self._weight, self.bias, "mul")
            return out
        return self._product(x).mul_(factor)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual` [M, out]; `residual` is left alone."""
        if self.is_packed:
            out: Tensor = self._binary(x, residual, self._weight, self.bias, "add")
            return out
        return self._product(x).add_(residual)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self.bias)


class BlockLinear(Linear):
    """The same on a CPU with AMX: products of 64 to 256 rows, a multiple of 64, the last ones filled with zeros."""

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        return _in_blocks(super().__call__, x)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the result."""
        return _in_blocks(super().silu, x)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The result times `factor` [M, out]."""
        return _in_blocks(super().times, x, factor)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual` [M, out]; `residual` is left alone."""
        return _in_blocks(super().plus, x, residual)


def _in_blocks(product: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    num_rows = len(operands[0])
    missing = -num_rows % BLOCK_ROWS
    if missing:
        operands = tuple(F.pad(operand, (0, 0, 0, missing)) for operand in operands)
    if num_rows <= MAX_BLOCK_ROWS:
        return product(*operands)[:num_rows]
    parts = zip(*(operand.split(MAX_BLOCK_ROWS) for operand in operands), strict=True)
    return torch.cat([product(*part) for part in parts])[:num_rows]


class TiledLinear(Linear):
    """The same on a GPU, from tiles of one size summed in one order: a row's bits do not depend on the others."""

    def _product(self, x: Tensor) -> Tensor:
        counts = torch.full((1,), len(x), device=x.device)
        grouped = dispatch.chosen("grouped_linear", x.device.type)
        out: Tensor = grouped(x, counts, self._weight[None])
        return out if self.bias is None else out.add_(self.bias)


def linear_for(device: torch.device, dtype: torch.dtype, numerics: Numerics) -> type[Linear]:
    """The product whose rows do not depend on each other where `numerics` asks for that."""
    if numerics == "fast":
        return Linear
    if device.type == "cuda":
        return TiledLinear
    return BlockLinear if dtype == torch.bfloat16 and has_tile_products() else Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x)), the feed-forward part of the family.

    Packed, gate and up stay two products so that SiLU and the multiplication are fused into them; elsewhere they are
    one product over stacked weights.
    """

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        biases: Biases = NO_BIASES,
        make: type[Linear] = Linear,
    ) -> None:
        self.down = make(down, biases[2])
        self._is_fused = not packs(gate)
        if self._is_fused:
            stacked = None
            if biases[0] is not None and biases[1] is not None:
                stacked = torch.cat([biases[0], biases[1]])
            self._gate_up = make(torch.cat([gate, up]), stacked)
        else:
            self._gate = make(gate, biases[0])
            self._up = make(up, biases[1])

    def inner(self, x: Tensor) -> Tensor:
        """silu(gate(x)) * up(x), [M, intermediate]."""
        if not self._is_fused:
            return self._up.times(x, self._gate.silu(x))
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual`, which is left alone."""
        return self.down.plus(self.inner(x), residual)
