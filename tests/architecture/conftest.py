"""The files the architecture tests read: what git tracks, plus new files it does not ignore."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def project_files() -> list[Path]:
    """Every file of the project, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = (Path(name) for name in listed.split("\0") if name)
    return [path for path in paths if (ROOT / path).is_file()]


@pytest.fixture(scope="session")
def python_files(project_files: list[Path]) -> Callable[..., list[Path]]:
    """The Python files below the given root folders; all of them without arguments."""

    def select(*tops: str) -> list[Path]:
        return [p for p in project_files if p.suffix == ".py" and (not tops or p.parts[0] in tops)]

    return select


@pytest.fixture(scope="session")
def syntax_tree() -> Callable[[Path], ast.Module]:
    def parse(path: Path) -> ast.Module:
        return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))

    return parse
