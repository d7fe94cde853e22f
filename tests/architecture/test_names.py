"""The four root names are generic (`kernels` exists elsewhere): nobody else may own them in this environment."""

from __future__ import annotations

import importlib.util
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGES = ("actors", "cluster", "configs", "kernels")
DISTRIBUTION = "dspark-cluster"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_name_resolves_inside_this_repository(name: str, root: Path) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == root / name / "__init__.py"


@pytest.mark.parametrize("name", PACKAGES)
def test_no_other_distribution_owns_the_name(name: str) -> None:
    owners = set(packages_distributions().get(name, ()))
    assert owners <= {DISTRIBUTION}, (
        f"{sorted(owners)} install a top-level package called {name!r}, which shadows ours; "
        "uninstall them from this environment"
    )


def test_no_test_folder_is_a_package(root: Path) -> None:
    """An `__init__.py` below tests/ would let a test folder shadow a package of the same name."""
    assert not list((root / "tests").rglob("__init__.py"))
