"""What import-linter (run by `make lint`) cannot say about the floors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = ("actors", "cluster", "configs", "kernels")
# The actors themselves, what they share, and the link that is made of actor calls.
RAY_USERS = {
    Path("actors", name)
    for name in (
        "allocator.py",
        "drafter.py",
        "target.py",
        "trainer.py",
        "shell.py",
        "link/actor_link.py",
    )
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_root_package_runs_no_code_on_import(
    name: str, syntax_tree: Callable[[Path], ast.Module]
) -> None:
    """Somebody else's `import kernels` may run it, so the root `__init__.py` is a docstring only."""
    tree = syntax_tree(Path(name) / "__init__.py")
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_every_module_of_actors_stands_on_a_floor(root: Path) -> None:
    """A module that no layer names would escape import-linter without a word."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    layers = " ".join(settings["tool"]["importlinter"]["contracts"][0]["layers"])
    placed = set(re.findall(r"actors\.(\w+)", layers))
    found = {
        path.stem
        for path in (root / "actors").iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
    assert found <= placed, f"name {sorted(found - placed)} in the layers of pyproject.toml"


def test_only_the_shells_among_the_actors_import_ray(
    python_files: Callable[..., list[Path]], syntax_tree: Callable[[Path], ast.Module]
) -> None:
    users = [p for p in python_files("actors") if "ray" in _imported_roots(syntax_tree(p))]
    strays = [str(path) for path in users if path not in RAY_USERS]
    assert not strays, f"only the shells may import ray, not {strays}"


@pytest.mark.parametrize("module", ["cluster.ingress", "cluster.cli"])
def test_the_front_starts_without_torch(module: str, root: Path) -> None:
    if not (root / Path(*module.split(".")).with_suffix(".py")).is_file():
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{module} cannot be imported\n{done.stderr}"
    assert done.stdout.strip() == "False", f"{module} imports torch"


def _imported_roots(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names
