"""Break a module by hand: the same source with one piece replaced."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of `module` in which `old`, which must occur exactly once, reads `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, (
        f"{old!r} occurs {source.count(old)} times in {module.__name__}: update the mutant"
    )
    broken = ModuleType(f"{module.__name__}_mutant")
    sys.modules[broken.__name__] = broken  # dataclasses look their module up
    broken.__file__ = module.__file__
    exec(
        compile(source.replace(old, new), f"<mutant of {module.__name__}>", "exec"), broken.__dict__
    )
    return broken
