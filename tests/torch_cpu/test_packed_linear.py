"""A row of a product gets the same bits whatever other rows are there, also where oneDNN multiplies in tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engine import packed_linear
from actors.engine.packed_linear import BlockLinear, GatedMlp, Linear, TiledLinear, linear_for
from tests.torch_cpu.oracle_models import engine_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RNG = torch.Generator().manual_seed(0)
STEADY_ROWS = {64, 128, 192, 256}


def normal(*size: int) -> Tensor:
    return torch.randn(size, generator=RNG)


class Unsteady:
    """oneDNN as it is with AMX: up to 36 rows, and more than anybody tried, are summed otherwise."""

    def __init__(self) -> None:
        self.seen = list[int]()

    def __call__(self, product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(linear: Linear, x: Tensor, *more: Tensor) -> Tensor:
            self.seen.append(len(x))
            return product(linear, x * (1 if 36 < len(x) <= 256 else 1.0 + 2.0**-7), *more)

        return computed


@pytest.mark.parametrize("num_rows", [1, 2, 36, 63, 64, 65, 256, 257, 300, 512, 600])
@pytest.mark.parametrize("name", ["__call__", "silu", "times", "plus"])
def test_a_product_in_blocks_equals_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, num_rows: int
) -> None:
    weight, bias, x = normal(8, 4), normal(8), normal(num_rows, 4)
    more = (normal(num_rows, 8),) if name in ("times", "plus") else ()
    want = getattr(Linear(weight, bias), name)(x, *more)
    before = [operand.clone() for operand in (x, *more)]
    oneDNN = Unsteady()
    monkeypatch.setattr(Linear, name, oneDNN(getattr(Linear, name)))
    found = getattr(BlockLinear(weight, bias), name)(x, *more)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert set(oneDNN.seen) <= STEADY_ROWS, "only sizes that agree with each other reach oneDNN"
    assert all(map(torch.equal, (x, *more), before))


def test_a_product_of_no_rows_has_no_rows() -> None:
    assert BlockLinear(normal(8, 4))(normal(0, 4)).shape == (0, 8)


@pytest.mark.parametrize(
    ("numerics", "device", "dtype", "kind"),
    [
        ("reproducible", CPU, torch.bfloat16, BlockLinear),
        ("reproducible", CPU, torch.float32, Linear),
        ("reproducible", CUDA, torch.bfloat16, TiledLinear),
        ("fast", CPU, torch.bfloat16, Linear),
        ("fast", CUDA, torch.bfloat16, Linear),
    ],
)
def test_only_reproducible_bfloat16_pays_for_tiles(
    monkeypatch: pytest.MonkeyPatch,
    numerics: packed_linear.Numerics,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Linear],
) -> None:
    monkeypatch.setattr(packed_linear, "has_tile_products", lambda: True)
    assert linear_for(device, dtype, numerics) is kind
    monkeypatch.setattr(packed_linear, "has_tile_products", lambda: False)
    assert (linear_for(device, dtype, numerics) is kind) == (kind is not BlockLinear)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3_moe"])
def test_with_tiles_every_product_of_a_model_is_made_in_blocks(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The whole engine on a oneDNN that sums few rows otherwise: its check of rows passes, and fails without blocks."""
    for method in ("__call__", "silu", "times", "plus"):
        monkeypatch.setattr(Linear, method, Unsteady()(getattr(Linear, method)))
    for has_tiles in (True, False):
        monkeypatch.setattr(packed_linear, "has_tile_products", lambda found=has_tiles: found)
        engine = engine_of(oracle_models / name, dtype="bfloat16")
        assert engine.check_row_invariance() == has_tiles


def test_a_step_in_blocks_is_another_machine_to_a_cost_curve(
    oracle_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = set()
    for has_tiles in (True, False):
        monkeypatch.setattr(packed_linear, "has_tile_products", lambda found=has_tiles: found)
        engine = engine_of(oracle_models / "llama", dtype="bfloat16")
        identities.add(engine.spec.identity)
    assert len(identities) == 2


def test_a_feed_forward_is_made_of_the_products_it_is_given() -> None:
    parts = GatedMlp(normal(8, 4), normal(8, 4), normal(4, 8), make=BlockLinear)
    assert {type(part) for part in vars(parts).values() if isinstance(part, Linear)} == {
        BlockLinear
    }
