"""A row of a product gets the same bits whatever other rows are there, or the product is cut until it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from actors.engine import packed_linear
from actors.engine.packed_linear import Linear, RowwiseLinear, TiledLinear, linear_for, packs

CPU = torch.device("cpu")
RNG = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def forget_probes() -> Iterator[None]:
    packed_linear._max_rows.cache_clear()
    yield
    packed_linear._max_rows.cache_clear()


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=RNG).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "inner"), [(49152, 576), (96, 64)])
def test_a_row_has_the_same_bits_beside_any_number_of_others(
    dtype: torch.dtype, out: int, inner: int
) -> None:
    weight = normal(out, inner, dtype=dtype)
    if not packs(weight):
        pytest.skip(f"oneDNN does not multiply {dtype} on this machine")
    product, x = RowwiseLinear(weight), normal(130, inner, dtype=dtype)
    want = product(x)
    for num_rows in (2, 7, 31, 32, 33, 64, 65, 128):
        assert torch.equal(product(x[:num_rows]), want[:num_rows]), num_rows


class Unsteady:
    """oneDNN as it could be: more than `steady` rows are summed otherwise."""

    def __init__(self, steady: int) -> None:
        self.steady, self.seen = steady, list[int]()

    def __call__(self, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(linear: Linear, *operands: Tensor) -> Tensor:
            self.seen.append(len(operands[0]))
            return product(linear, *operands) + (len(operands[0]) > self.steady)

        return computed


@pytest.mark.parametrize(
    ("steady", "limit"), [(16, 16), (20, 16), (32, 32), (100, 64), (255, 128), (256, None)]
)
def test_the_limit_is_the_most_probed_rows_that_few_rows_agree_with(
    monkeypatch: pytest.MonkeyPatch, steady: int, limit: int | None
) -> None:
    monkeypatch.setattr(Linear, "__call__", Unsteady(steady)(Linear.__call__))
    if not packs(normal(4, 4)):
        pytest.skip("oneDNN is not there")
    assert RowwiseLinear(normal(8, 4)).max_rows == limit


@pytest.mark.parametrize("num_rows", [2, 16, 17, 33, 100])
def test_what_is_cut_gives_what_the_whole_would(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    weight, bias = normal(8, 4), normal(8)
    whole, cut = Linear(weight, bias), RowwiseLinear(weight, bias)
    x, other = normal(num_rows, 4), normal(num_rows, 8)
    cut.max_rows = 16
    calls = [("__call__", ()), ("silu", ()), ("times", (other,)), ("plus", (other,))]
    for name, more in calls:
        want = getattr(whole, name)(x, *more)
        watched = Unsteady(16)
        with monkeypatch.context() as patch:
            patch.setattr(Linear, name, watched(getattr(Linear, name)))
            assert torch.allclose(getattr(cut, name)(x, *more), want, atol=1e-6), name
        assert sum(watched.seen) == num_rows
        assert all(1 < rows <= 16 for rows in watched.seen), "no part is a lone row"


def test_only_reproducible_numerics_pay_for_it() -> None:
    assert linear_for(CPU, "fast") is Linear
    assert linear_for(CPU, "reproducible") is RowwiseLinear
    assert linear_for(torch.device("cuda"), "reproducible") is TiledLinear
