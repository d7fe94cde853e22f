"""What a machine of a cluster installs: every file of the bundled models is in the wheel, or left out by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

MOST_BYTES = 70e6  # of model files in the wheel; each machine of a cluster gets it


@pytest.fixture(scope="module")
def files(root: Path) -> dict[str, set[Path]]:
    """Files below configs/ that the wheel takes in and that it leaves out, by their patterns."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    configs = root / "configs"
    return {
        name: {
            path.relative_to(configs)
            for pattern in setuptools[name]["configs"]
            for path in configs.glob(pattern)
            if path.is_file()
        }
        for name in ("package-data", "exclude-package-data")
    }


def test_every_file_of_a_model_is_taken_in_or_left_out_by_name(
    root: Path, files: dict[str, set[Path]]
) -> None:
    configs = root / "configs"
    every = {p.relative_to(configs) for p in (configs / "models").rglob("*") if p.is_file()}
    both = files["package-data"] | files["exclude-package-data"]
    assert every <= both, f"name these in pyproject.toml: {sorted(every - both)}"


def test_what_is_served_is_in_the_wheel_and_what_is_only_compared_is_not(
    root: Path, files: dict[str, set[Path]]
) -> None:
    inside = files["package-data"] - files["exclude-package-data"]
    model = Path("models/smollm2-135m")
    assert {model / "drafter/model.safetensors", model / "mtp1/model.safetensors"} <= inside
    assert {model / "held_out/text.json", model / "config.json"} <= inside
    assert any("compared" in path.parts for path in files["exclude-package-data"])
    assert not [path for path in inside if "compared" in path.parts]
    assert sum((root / "configs" / path).stat().st_size for path in inside) < MOST_BYTES
