"""Linear layers whose weights are laid out once for the machine, with what follows them fused in.

On CPU, oneDNN multiplies from weights reordered at load (a quarter to a third faster at few rows; in fp32 up to twice),
and applies SiLU, a product or a residual sum to the result while it is hot. In bf16 and in fp32 it gives a row the same
bits whatever other rows are there, except that a lone row takes another path, which rounds one result in ten thousand
differently (hence `min_rows`), and that with AMX a wide product sums otherwise from some number of rows on (hence
`RowwiseLinear`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import dispatch

PACK_ROWS = 16  # rows the layout is chosen for; it serves any number
PROBED_ROWS = (256, 128, 64, 32)

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


class RowwiseLinear(Linear):
    """The same on a CPU, cut by rows where oneDNN would give many rows other bits than few."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.max_rows = None
        if self.is_packed:
            threads = torch.get_num_threads()
            self.max_rows = _max_rows(*weight.shape, weight.dtype, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        return self._by_rows(super().__call__, x)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the result."""
        return self._by_rows(super().silu, x)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The result times `factor` [M, out]."""
        return self._by_rows(super().times, x, factor)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result plus `residual` [M, out]; `residual` is left alone."""
        return self._by_rows(super().plus, x, residual)

    def _by_rows(self, product: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        num_rows = len(operands[0])
        if self.max_rows is None or num_rows <= self.max_rows:
            return product(*operands)
        # Even parts: none is a lone row.
        parts = (t.tensor_split(-(-num_rows // self.max_rows)) for t in operands)
        return torch.cat([product(*part) for part in zip(*parts, strict=True)])


@cache
def _max_rows(out_features: int, in_features: int, dtype: torch.dtype, _threads: int) -> int | None:
    """Return how many rows of a product of this shape get the bits that few rows get; None: no limit was found.

    What oneDNN chooses depends on the shape, not on the numbers. The probe takes milliseconds, once a shape.
    """
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((out_features, in_features), (PROBED_ROWS[0], in_features))
    )
    product = Linear(weight)
    few = torch.cat([product(part) for part in x.split(PACK_ROWS)])
    for num_rows in PROBED_ROWS:
        if torch.equal(product(x[:num_rows]), few[:num_rows]):
            return None if num_rows == PROBED_ROWS[0] else num_rows
    return PACK_ROWS


class TiledLinear(Linear):
    """The same on a GPU, from tiles of one size summed in one order: a row's bits do not depend on the others."""

    def _product(self, x: Tensor) -> Tensor:
        counts = torch.full((1,), len(x), device=x.device)
        grouped = dispatch.chosen("grouped_linear", x.device.type)
        out: Tensor = grouped(x, counts, self._weight[None])
        return out if self.bias is None else out.add_(self.bias)


def linear_for(device: torch.device, numerics: Numerics) -> type[Linear]:
    """Return the kind of product whose rows do not depend on each other where `numerics` asks for that."""
    if numerics == "fast":
        return Linear
    return TiledLinear if device.type == "cuda" else RowwiseLinear


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
