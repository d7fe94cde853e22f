"""What is read from the flags of a CPU, and the defaults that follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import machine
from configs.load import load

AVX512 = "flags\t\t: fpu avx2 avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("flags", "overrides", "dtype"),
    [
        (AVX512, [], "bfloat16"),
        ("flags\t: avx_ne_convert", [], "bfloat16"),
        ("flags\t: fpu avx2 avx512bw", [], "float32"),
        ("", [], "float32"),
        ("flags\t: avx2", ["model.dtype=bfloat16"], "bfloat16"),
        (AVX512, ["model.dtype=float32"], "float32"),
        (
            "flags\t: avx2",
            ["model.device=cuda", "target.num_gpus=0.5", "drafter.num_gpus=0.5"],
            "bfloat16",
        ),
    ],
)
def test_the_number_format_follows_the_machine_unless_it_is_given(
    flags: str, overrides: list[str], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\n{flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    machine.multiplies_bfloat16.cache_clear()
    assert load("laptop-cpu", overrides, {}).model.dtype == dtype
    machine.multiplies_bfloat16.cache_clear()


def test_a_machine_that_tells_nothing_computes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "absent")
    machine.multiplies_bfloat16.cache_clear()
    assert not machine.multiplies_bfloat16()
    machine.multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("flags", "has_tiles"), [("avx512f amx_bf16 amx_tile", True), ("avx512_bf16", False)]
)
def test_tile_products_are_read_from_the_flags(
    flags: str, has_tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor: 0\nflags : {flags}\n")
    monkeypatch.setattr(machine, "CPUINFO", cpuinfo)
    machine.has_tile_products.cache_clear()
    assert machine.has_tile_products() == has_tiles
    machine.has_tile_products.cache_clear()
