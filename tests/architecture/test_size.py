"""Small files and small functions: growing past a limit is a decision, taken here."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

FILE_LIMIT, KERNEL_LIMIT, FUNCTION_LIMIT = 300, 400, 50  # lines


def test_no_file_is_too_long(python_files: Callable[..., list[Path]], root: Path) -> None:
    breaches = []
    for path in python_files():
        limit = KERNEL_LIMIT if path.parts[0] == "kernels" else FILE_LIMIT
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if lines > limit:
            breaches.append(f"{path}: {lines} lines, allowed {limit}")
    assert not breaches, "\n".join(["split these files:", *breaches])


def test_no_function_is_too_long(
    python_files: Callable[..., list[Path]], syntax_tree: Callable[[Path], ast.Module]
) -> None:
    breaches = []
    for path in python_files():
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _code_lines(node)
                if lines > FUNCTION_LIMIT:
                    breaches.append(
                        f"{path}:{node.lineno} {node.name}: {lines} lines, allowed {FUNCTION_LIMIT}"
                    )
    assert not breaches, "\n".join(["split these functions:", *breaches])


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: explaining more must not cost code."""
    assert node.end_lineno is not None
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total
